-- Restores the parts of a record that are missing.
local function restore_penalty(op, state)
  local strikes, parole = unpack('<dd', bytes, op.penalty_position - 16)
  refresh_record(op, state)
  strikes = min(strikes, op.max_strikes)
  if strikes == 0 then return end
  if state.strikes == 0 then state.parole = 0 end
  state.strikes = max(state.strikes - forgiven_strikes(op, state), strikes)
  state.blocked_until = max(state.blocked_until, min(now + min(op.cost, block_length(op, strikes)), NEVER))
  if op.grants_parole == 1 then state.parole = max(state.parole, parole) end
end
