-- core/quota.rs. A ledger is the `start` and `stop` of the period that is counted, and what is `used` of it.

load[QUOTA] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.start, state.stop, state.used = 0, 0, 0
    return
  end
  state.exists = true
  state.kept, state.start, state.stop, state.used = unpack('<dddd', value)
  if #value > 32 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 33) end
end

-- Picks the present one of the three periods that the caller sent. Without it there is no answer, and nothing may have
-- been changed yet.
select_period = function(op)
  local limit, first, second, third, last = unpack('<ddddd', bytes, op.place)
  op.limit = limit
  if now < first or now >= last then return false end
  if now < second then
    op.start, op.stop = first, second
  elseif now < third then
    op.start, op.stop = second, third
  else
    op.start, op.stop = third, last
  end
  return true
end

-- The ledger as it counts now.
local function current_usage(op, state)
  if state.start < op.start then return op.start, op.stop, 0 end
  return state.start, state.start == op.start and op.stop or state.stop, state.used
end

local function refresh_quota(op, state)
  if state.start > op.stop then
    state.start, state.stop = op.start, op.stop
    state.changed = true
  end
end

evaluate[QUOTA] = function(op, state)
  refresh_quota(op, state)
  local _, stop, used = current_usage(op, state)
  if op.never == 1 then
    op.free_at = NEVER
    return false
  end
  if op.cost <= max(op.limit - used, 0) then return true end
  op.free_at = stop
  return false
end

has_room_for_parole[QUOTA] = function(op, state)
  local _, _, used = current_usage(op, state)
  return state.parole <= max(op.limit - used, 0)
end

charge[QUOTA] = function(op, state)
  local start, stop, used = current_usage(op, state)
  state.start, state.stop, state.used = start, stop, min(used + op.cost, MAX_EXACT_INTEGER)
end

save[QUOTA] = function(op, state)
  local value = pack('<ddd', state.start, state.stop, state.used)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  write_or_delete(state, max(state.used > 0 and state.stop or 0, record_retained_until(op, state)), value)
end

encode_state[QUOTA] = function(state)
  return pack('<ddd', state.start, state.stop, state.used)
end
