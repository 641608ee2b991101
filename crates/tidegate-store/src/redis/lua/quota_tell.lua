tell[QUOTA] = function(op, state)
  if op.verb ~= REFUND then return false end
  settle_quota(op, state)
  local _, _, used = counted(op, state)
  if used > 0 then state.used = max(state.used - op.cost, 0) end
  return true
end
