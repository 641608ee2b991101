-- core/cooldown.rs. A gate is `open_at`, `last`, `generation` and `step`.

load[COOLDOWN] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.opens_at, state.last_event_at, state.generation, state.closings_in_row = 0, 0, 0, 0
    return
  end
  state.exists = true
  state.kept, state.opens_at, state.last_event_at, state.generation, state.closings_in_row = unpack('<dddII', value)
  if #value > 32 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 33) end
end

local function gate_idle_at(op, state)
  if state.opens_at == 0 and state.last_event_at == 0 and state.generation == 0 and state.closings_in_row == 0 then return 0 end
  return min(max(state.opens_at, state.last_event_at) + op.retention, NEVER)
end

local function refresh_gate(op, state)
  op.base_wait, op.cap_wait, op.stagger, op.max_release_time, op.retention, op.generation =
    unpack('<dddddd', bytes, op.place)
  if state.last_event_at > now + MAX_CLOCK_LAG then
    if state.opens_at > 0 and state.opens_at ~= NEVER then
      state.opens_at = min(now + max(state.opens_at - state.last_event_at, 0), NEVER)
    end
    state.last_event_at = now
    state.changed = true
  end
  if gate_idle_at(op, state) <= now then
    if state.exists then state.changed = true end
    state.opens_at, state.last_event_at, state.generation, state.closings_in_row = 0, 0, 0, 0
  elseif
    state.closings_in_row == 0
    and state.last_event_at >= state.opens_at
    and (min(state.last_event_at + 2 * op.stagger, NEVER) <= now or min(state.opens_at + op.max_release_time, NEVER) <= now)
  then
    if state.opens_at ~= 0 then state.changed = true end
    state.opens_at = 0
  end
end

local function gate_free_at(op, state)
  if state.opens_at == 0 then return now end
  if state.last_event_at < state.opens_at then return max(state.opens_at, now) end
  return max(min(state.last_event_at + op.stagger, NEVER), now)
end

evaluate[COOLDOWN] = function(op, state)
  refresh_gate(op, state)
  op.free_at = gate_free_at(op, state)
  return op.free_at <= now
end

has_room_for_parole[COOLDOWN] = function(op, state)
  return state.parole <= (op.free_at > now and 0 or 1)
end

charge[COOLDOWN] = function(_, state)
  if state.opens_at > 0 then state.last_event_at = now end
end

save[COOLDOWN] = function(op, state)
  local value = pack('<ddII', state.opens_at, state.last_event_at, state.generation, state.closings_in_row)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  write_or_delete(state, max(gate_idle_at(op, state), record_retained_until(op, state)), value)
end

encode_state[COOLDOWN] = function(state)
  return pack('<ddII', state.opens_at, state.last_event_at, state.generation, state.closings_in_row)
end
