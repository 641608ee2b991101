-- core/penalty.rs. A record is `ends` (when the last block ends or ended), `parole` and `strikes`.

local function block(op, strike)
  local length = op.base
  for _ = 2, strike do
    if length >= op.cap then break end
    length = length * op.factor
  end
  return min(length, op.cap)
end

local function forgiven(op, state)
  return floor(max(now - state.ends, 0) / op.forgive)
end

local function settle_record(op, state)
  if state.strikes == 0 then return end
  local longest = block(op, state.strikes)
  if state.ends > now + longest + OVERTAKEN then
    state.ends = min(now + longest, NEVER)
    state.changed = true
  end
  if forgiven(op, state) >= state.strikes then
    state.ends, state.strikes = 0, 0
    state.changed = true
  end
end

local function strike(op, state)
  state.strikes = min(max(state.strikes - forgiven(op, state), 0) + 1, op.last)
  state.ends = min(now + block(op, state.strikes), NEVER)
  state.parole = op.paroles == 1 and op.cost or 0
  state.changed = true
end

local function remembered(op, state)
  if state.strikes == 0 or op.penalised == 0 then return 0 end
  return min(state.ends + op.forgive * state.strikes, NEVER)
end
