-- core/cooldown.rs. A gate is `opens_at`, `last_event_at`, `generation` and `closings_in_row`.

load[COOLDOWN] = function(state)
  state.kept_until, state.opens_at, state.last_event_at, state.generation, state.closings_in_row =
    unpack('<dddII', read_value(state, 32))
end

local function gate_idle_at(op, state)
  if state.opens_at == 0 and state.last_event_at == 0 and state.generation == 0 and state.closings_in_row == 0 then return 0 end
  return min(max(state.opens_at, state.last_event_at) + op.retention, NEVER)
end

local function refresh_gate(op, state)
  op.base_wait, op.cap_wait, op.stagger, op.max_release_time, op.retention, op.generation =
    unpack('<dddddd', bytes, op.position)
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

evaluate[COOLDOWN] = function(op, state)
  refresh_gate(op, state)
  if state.opens_at == 0 then
    op.free_at = now
  elseif state.last_event_at < state.opens_at then
    op.free_at = max(state.opens_at, now)
  elseif state.closings_in_row == 0 then
    local rises = floor(max(state.last_event_at - state.opens_at, 0) / max(20 * op.stagger, 1))
    local slot_end = state.last_event_at + floor(op.stagger / (rises + 1))
    op.free_at = max(min(slot_end, state.opens_at + op.max_release_time, NEVER), now)
  else
    op.free_at = max(min(state.last_event_at + op.stagger, NEVER), now)
  end
  return op.free_at <= now
end

has_room_for_parole[COOLDOWN] = function(op, state)
  return state.parole <= (op.free_at > now and 0 or 1)
end

charge[COOLDOWN] = function(_, state)
  if state.opens_at > 0 then state.last_event_at = now end
end

save[COOLDOWN] = function(op, state)
  write_value(op, state, gate_idle_at(op, state))
end

encode_state[COOLDOWN] = function(state)
  return pack('<ddII', state.opens_at, state.last_event_at, state.generation, state.closings_in_row)
end
