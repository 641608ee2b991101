tell[CONCURRENCY] = function(op, state)
  if op.verb ~= RELEASE and op.verb ~= RENEW then return false end
  op.limit, op.lease = unpack('<dd', bytes, op.place)
  settle_permits(op, state)
  local own = find(state, holder)
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
