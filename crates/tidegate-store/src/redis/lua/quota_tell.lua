tell[QUOTA] = function(op, state)
  if op.verb ~= REFUND then return false end
  settle_quota(op, state)
  local charged_at = unpack('<d', bytes, op.place + 40)
  local start, _, used = counted(op, state)
  if used > 0 and charged_at >= start then state.used = max(state.used - op.cost, 0) end
  return true
end
