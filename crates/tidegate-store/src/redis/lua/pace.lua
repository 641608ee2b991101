-- core/pacer/shared.rs. A pace is `interval`, `successes` and `updated_at`; intervals are nanoseconds, below 2^51.

load[PACE] = function(state)
  state.kept_until, state.interval, state.successes, state.updated_at = unpack('<dddd', read_value(state, 32))
end

local function pace_idle_at(op, state)
  if state.interval == 0 then return 0 end
  return min(state.updated_at + op.retention, NEVER)
end

local function refresh_pace(op, state)
  op.retention, op.initial, op.longest = unpack('<ddd', bytes, op.position)
  if state.updated_at > now + MAX_CLOCK_LAG then state.updated_at, state.changed = now, true end
  if pace_idle_at(op, state) <= now then
    if state.exists then state.changed = true end
    state.interval, state.successes, state.updated_at = 0, 0, 0
  else
    local interval = min(max(state.interval, op.initial), op.longest)
    if interval ~= state.interval then state.interval, state.changed = interval, true end
  end
end

evaluate[PACE] = function(op, state)
  refresh_pace(op, state)
  return true
end

has_room_for_parole[PACE] = function(op, state)
  return state.parole <= op.longest - state.interval
end

charge[PACE] = function() end

save[PACE] = function(op, state)
  write_value(op, state, pace_idle_at(op, state))
end

encode_state[PACE] = function(state)
  return pack('<ddd', state.interval, state.successes, state.updated_at)
end
