tell[RATE] = function(op, state)
  if op.verb ~= REFUND then return false end
  judge[RATE](op, state)
  local from, from_rest = current(state)
  local rest = from_rest - op.step_rest
  local back = from - op.step
  if rest < 0 then
    back, rest = back - 1, rest + 1024
  end
  if back < now then
    back, rest = now, 0
  end
  state.tat, state.tat_rest = back, rest
  return true
end
