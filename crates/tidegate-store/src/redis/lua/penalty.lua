-- core/penalty.rs. A record is `ends` (when the last block ends or ended), `parole` and `strikes`.

local function block_length(op, add_strike)
  local length = op.base
  for _ = 2, add_strike do
    if length >= op.cap then break end
    length = length * op.factor
  end
  return min(length, op.cap)
end

local function forgiven_strikes(op, state)
  return floor(max(now - state.ends, 0) / op.forgive)
end

local function refresh_record(op, state)
  if state.strikes == 0 then return end
  local longest = block_length(op, state.strikes)
  if state.ends > now + longest + MAX_CLOCK_LAG then
    state.ends = min(now + longest, NEVER)
    state.changed = true
  end
  if forgiven_strikes(op, state) >= state.strikes then
    state.ends, state.strikes = 0, 0
    state.changed = true
  end
end

local function add_strike(op, state)
  state.strikes = min(max(state.strikes - forgiven_strikes(op, state), 0) + 1, op.last)
  state.ends = min(now + block_length(op, state.strikes), NEVER)
  state.parole = op.paroles == 1 and op.cost or 0
  state.changed = true
end

local function record_retained_until(op, state)
  if state.strikes == 0 or op.penalised == 0 then return 0 end
  return min(state.ends + op.forgive * state.strikes, NEVER)
end
