apply[QUOTA] = function(op, state)
  if op.verb ~= REFUND then return false end
  refresh_quota(op, state)
  local charged_at = unpack('<d', bytes, op.position + 40)
  local period_start, _, used = current_usage(op, state)
  if used > 0 and charged_at >= period_start then state.used = max(state.used - op.cost, 0) end
  return true
end
