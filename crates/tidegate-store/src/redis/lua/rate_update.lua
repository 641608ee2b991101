apply[RATE] = function(op, state)
  if op.verb ~= REFUND then return false end
  evaluate[RATE](op, state)
  local tat, tat_rest = current_tat(state)
  tat, tat_rest = tat - op.cost_time, tat_rest - op.cost_rest
  if tat_rest < 0 then
    tat, tat_rest = tat - 1, tat_rest + 1024
  end
  if tat < now then
    tat, tat_rest = now, 0
  end
  state.tat, state.tat_rest = tat, tat_rest
  return true
end
