-- core/cooldown.rs. A gate is `open_at`, `last`, `generation` and `step`.

load[COOLDOWN] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.open_at, state.last, state.generation, state.step = 0, 0, 0, 0
    return
  end
  state.exists = true
  state.kept, state.open_at, state.last, state.generation, state.step = unpack('<dddII', value)
  if #value > 32 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 33) end
end

local function gate_idle_at(op, state)
  if state.open_at == 0 and state.last == 0 and state.generation == 0 and state.step == 0 then return 0 end
  return min(max(state.open_at, state.last) + op.remembered, NEVER)
end

local function settle_gate(op, state)
  op.base_wait, op.cap_wait, op.stagger, op.released, op.remembered, op.generation =
    unpack('<dddddd', bytes, op.place)
  if state.last > now + OVERTAKEN then
    if state.open_at > 0 and state.open_at ~= NEVER then
      state.open_at = min(now + max(state.open_at - state.last, 0), NEVER)
    end
    state.last = now
    state.changed = true
  end
  if gate_idle_at(op, state) <= now then
    if state.exists then state.changed = true end
    state.open_at, state.last, state.generation, state.step = 0, 0, 0, 0
  elseif
    state.step == 0
    and state.last >= state.open_at
    and (min(state.last + 2 * op.stagger, NEVER) <= now or min(state.open_at + op.released, NEVER) <= now)
  then
    if state.open_at ~= 0 then state.changed = true end
    state.open_at = 0
  end
end

local function gate_free_at(op, state)
  if state.open_at == 0 then return now end
  if state.last < state.open_at then return max(state.open_at, now) end
  return max(min(state.last + op.stagger, NEVER), now)
end

judge[COOLDOWN] = function(op, state)
  settle_gate(op, state)
  op.free_at = gate_free_at(op, state)
  return op.free_at <= now
end

covers[COOLDOWN] = function(op, state)
  return state.parole <= (op.free_at > now and 0 or 1)
end

charge[COOLDOWN] = function(_, state)
  if state.open_at > 0 then state.last = now end
end

save[COOLDOWN] = function(op, state)
  local value = pack('<ddII', state.open_at, state.last, state.generation, state.step)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  keep(state, max(gate_idle_at(op, state), remembered(op, state)), value)
end

facts[COOLDOWN] = function(state)
  return pack('<ddII', state.open_at, state.last, state.generation, state.step)
end
