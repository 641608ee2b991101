apply[RATE] = function(op, state)
  if op.verb ~= REFUND then return false end
  evaluate[RATE](op, state)
  local current_tat, from_rest = current_tat(state)
  local rest = from_rest - op.step_rest
  local tat = current_tat - op.step
  if rest < 0 then
    tat, rest = tat - 1, rest + 1024
  end
  if tat < now then
    tat, rest = now, 0
  end
  state.tat, state.tat_rest = tat, rest
  return true
end
