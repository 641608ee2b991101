-- core/penalty.rs. A record is `blocked_until` (the end of the last block), `parole` and `strikes`.

local function block_length(op, strikes)
  local length = op.base
  for _ = 2, strikes do
    if length >= op.cap then break end
    length = length * op.factor
  end
  return min(length, op.cap)
end

local function forgiven_strikes(op, state)
  return floor(max(now - state.blocked_until, 0) / op.forgive_after)
end

local function refresh_record(op, state)
  if state.strikes == 0 then return end
  local longest = block_length(op, state.strikes)
  if state.blocked_until > now + longest + MAX_CLOCK_LAG then
    state.blocked_until = min(now + longest, NEVER)
    state.changed = true
  end
  if forgiven_strikes(op, state) >= state.strikes then
    state.blocked_until, state.strikes = 0, 0
    state.changed = true
  end
end

local function add_strike(op, state)
  state.strikes = min(max(state.strikes - forgiven_strikes(op, state), 0) + 1, op.max_strikes)
  state.blocked_until = min(now + block_length(op, state.strikes), NEVER)
  state.parole = op.grants_parole == 1 and op.cost or 0
  state.changed = true
end

local function record_retained_until(op, state)
  if state.strikes == 0 or op.has_penalty == 0 then return 0 end
  return min(state.blocked_until + op.forgive_after * state.strikes, NEVER)
end
