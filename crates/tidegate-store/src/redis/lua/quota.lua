-- core/quota.rs. A usage is the `period_start` and `period_end` of the period that is counted, and the part `used`.

load[QUOTA] = function(state)
  state.kept_until, state.period_start, state.period_end, state.used = unpack('<dddd', read_value(state, 32))
end

-- Selects the present one of the three periods that the caller sent. Returns false if it is none of them; nothing may
-- have been changed yet.
select_period = function(op)
  local limit, first, second, third, last = unpack('<ddddd', bytes, op.position)
  op.limit = limit
  if now < first or now >= last then return false end
  if now < second then
    op.period_start, op.period_end, op.next_period_end = first, second, third
  elseif now < third then
    op.period_start, op.period_end, op.next_period_end = second, third, last
  else
    op.period_start, op.period_end, op.next_period_end = third, last, NEVER
  end
  return true
end

-- Returns the usage as it counts now.
local function current_usage(op, state)
  if state.period_start < op.period_start then return op.period_start, op.period_end, 0 end
  return state.period_start, state.period_start == op.period_start and op.period_end or state.period_end, state.used
end

local function refresh_quota(op, state)
  if state.period_start > op.period_end then
    state.period_start, state.period_end = op.period_start, op.period_end
    state.changed = true
  end
end

evaluate[QUOTA] = function(op, state)
  refresh_quota(op, state)
  local _, period_end, used = current_usage(op, state)
  if op.exceeds_capacity == 0 and op.cost <= max(op.limit - used, 0) then return true end
  op.free_at = op.exceeds_capacity == 1 and NEVER or period_end
  return false
end

has_room_for_parole[QUOTA] = function(op, state)
  local _, _, used = current_usage(op, state)
  return state.parole <= max(op.limit - used, 0)
end

charge[QUOTA] = function(op, state)
  local period_start, period_end, used = current_usage(op, state)
  state.period_start, state.period_end, state.used = period_start, period_end, min(used + op.cost, MAX_EXACT_INTEGER)
end

save[QUOTA] = function(op, state)
  write_value(op, state, state.used > 0 and state.period_end or 0)
end

encode_state[QUOTA] = function(state)
  return pack('<ddd', state.period_start, state.period_end, state.used)
end
