local MAX_PERMITS = 4096

apply[CONCURRENCY] = function(op, state)
  if op.verb ~= RELEASE and op.verb ~= RENEW and op.verb ~= DEBIT then return false end
  op.limit, op.lease = unpack('<dd', bytes, op.place)
  refresh_permits(op, state)
  local own = find_permit(state, holder)
  if op.verb == DEBIT then
    if own or op.cost <= MAX_PERMITS - state.used then charge[CONCURRENCY](op, state) end
    return true
  end
  if not own then
    op.done = 0
    return state.changed
  end
  local _, count = read_permit(state, own)
  remove_permit(state, own)
  if op.verb == RENEW then
    insert_permit(state, holder, count, min(now + op.lease, NEVER))
  else
    state.used = state.used - count
  end
  return true
end
