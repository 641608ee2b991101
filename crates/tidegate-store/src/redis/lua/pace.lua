-- core/pacer/shared.rs. A tempo is `interval`, `successes` and `told_at`; intervals are nanoseconds, below 2^51.

load[PACE] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.interval, state.successes, state.told_at = 0, 0, 0
    return
  end
  state.exists = true
  state.kept, state.interval, state.successes, state.told_at = unpack('<dddd', value)
  if #value > 32 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 33) end
end

local function pace_idle_at(op, state)
  if state.interval == 0 then return 0 end
  return min(state.told_at + op.remembered, NEVER)
end

local function settle_pace(op, state)
  op.remembered, op.initial, op.longest = unpack('<ddd', bytes, op.place)
  if state.told_at > now + OVERTAKEN then state.told_at, state.changed = now, true end
  if pace_idle_at(op, state) <= now then
    if state.exists then state.changed = true end
    state.interval, state.successes, state.told_at = 0, 0, 0
  else
    local interval = min(max(state.interval, op.initial), op.longest)
    if interval ~= state.interval then state.interval, state.changed = interval, true end
  end
end

judge[PACE] = function(op, state)
  settle_pace(op, state)
  return true
end

covers[PACE] = function(op, state)
  return state.parole <= op.longest - state.interval
end

charge[PACE] = function() end

save[PACE] = function(op, state)
  local value = pack('<ddd', state.interval, state.successes, state.told_at)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  keep(state, max(pace_idle_at(op, state), remembered(op, state)), value)
end

facts[PACE] = function(state)
  return pack('<ddd', state.interval, state.successes, state.told_at)
end
