-- Brings back what a record lacks.
local function restore_penalty(op, state)
  local strikes, parole = unpack('<dd', bytes, op.penalty - 16)
  refresh_record(op, state)
  strikes = min(strikes, op.last)
  if strikes == 0 then return end
  state.strikes = max(state.strikes - forgiven_strikes(op, state), strikes)
  state.ends = max(state.ends, min(now + min(op.cost, block_length(op, strikes)), NEVER))
  if op.paroles == 1 then state.parole = max(state.parole, parole) end
end
