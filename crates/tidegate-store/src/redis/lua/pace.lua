-- core/pacer/shared.rs. A tempo is `interval`, `successes` and `told_at`; intervals are nanoseconds, below 2^51.

load[PACE] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.interval, state.successes, state.updated_at = 0, 0, 0
    return
  end
  state.exists = true
  state.kept, state.interval, state.successes, state.updated_at = unpack('<dddd', value)
  if #value > 32 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 33) end
end

local function pace_idle_at(op, state)
  if state.interval == 0 then return 0 end
  return min(state.updated_at + op.retention, NEVER)
end

local function refresh_pace(op, state)
  op.retention, op.initial, op.longest = unpack('<ddd', bytes, op.place)
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
  local value = pack('<ddd', state.interval, state.successes, state.updated_at)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  write_or_delete(state, max(pace_idle_at(op, state), record_retained_until(op, state)), value)
end

encode_state[PACE] = function(state)
  return pack('<ddd', state.interval, state.successes, state.updated_at)
end
