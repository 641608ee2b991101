local MAX_PERMITS = 4096

apply[CONCURRENCY] = function(op, state)
  if op.verb ~= RELEASE and op.verb ~= RENEW and op.verb ~= DEBIT then return false end
  op.limit, op.lease = unpack('<dd', bytes, op.position)
  refresh_permits(op, state)
  local own_position = find_permit(state)
  if op.verb == DEBIT then
    if own_position or op.cost <= MAX_PERMITS - state.used then charge[CONCURRENCY](op, state) end
    return true
  end
  if not own_position then
    op.is_applied = 0
    return state.changed
  end
  local _, count = read_permit(state, own_position)
  remove_permit(state, own_position)
  if op.verb == RENEW then
    insert_permit(state, count, min(now + op.lease, NEVER))
  else
    state.used = state.used - count
  end
  return true
end
