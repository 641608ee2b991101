local MOST_PERMITS = 4096

tell[CONCURRENCY] = function(op, state)
  if op.verb ~= RELEASE and op.verb ~= RENEW and op.verb ~= DEBIT then return false end
  op.limit, op.lease = unpack('<dd', bytes, op.place)
  settle_permits(op, state)
  local own = find(state, holder)
  if op.verb == DEBIT then
    if own or op.cost <= MOST_PERMITS - state.used then charge[CONCURRENCY](op, state) end
    return true
  end
  if not own then
    op.done = 0
    return state.changed
  end
  local _, count = permit(state, own)
  without(state, own)
  if op.verb == RENEW then
    put(state, holder, count, min(now + op.lease, NEVER))
  else
    state.used = state.used - count
  end
  return true
end
