-- core/rate.rs. An arrival time has 62 bits, in units of 1/1024 µs: more than a double counts. So it is the whole
-- microseconds and, apart, the units beyond them (`_rest`); and so are steps and refills.

load[RATE] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.tat, state.tat_rest = 0, 0
    return
  end
  state.exists = true
  state.kept, state.tat, state.tat_rest = unpack('<ddd', value)
  if #value > 24 then state.ends, state.parole, state.strikes = unpack('<ddB', value, 25) end
end

local function is_later(a, a_rest, b, b_rest)
  return a > b or (a == b and a_rest > b_rest)
end

local function add(a, a_rest, b, b_rest)
  local rest = a_rest + b_rest
  if rest >= 1024 then return a + b + 1, rest - 1024 end
  return a + b, rest
end

-- The arrival time as it counts now.
local function current_tat(state)
  if state.tat < now then return now, 0 end
  return state.tat, state.tat_rest
end

evaluate[RATE] = function(op, state)
  op.step, op.step_rest, op.refill, op.refill_rest, op.burst, op.spacing, op.spacing_rest, op.lead =
    unpack('<dddddddd', bytes, op.place)
  op.max_tat, op.most_rest = add(now + op.refill, op.refill_rest, op.refill, op.refill_rest)
  if is_later(state.tat, state.tat_rest, op.max_tat + MAX_CLOCK_LAG, op.most_rest) then
    state.tat, state.tat_rest = now + op.refill, op.refill_rest
    state.changed = true
  end
  local from, from_rest = current_tat(state)
  local after, after_rest = add(from, from_rest, op.step, op.step_rest)
  if op.never == 1 then
    op.free_at = NEVER
    return false
  end
  if op.cost == 0 or not is_later(after, after_rest, now + op.refill, op.refill_rest) then return true end
  op.free_at = after - op.refill + (after_rest > op.refill_rest and 1 or 0)
  return false
end

-- Whether what is left covers as much as a parole: free ÷ spacing >= parole.
has_room_for_parole[RATE] = function(op, state)
  if state.parole > op.burst then return false end
  local from, from_rest = current_tat(state)
  local rest = op.spacing_rest * state.parole
  local carry = floor(rest / 1024)
  local after, after_rest = add(from, from_rest, op.spacing * state.parole + carry, rest - carry * 1024)
  return not is_later(after, after_rest, now + op.refill, op.refill_rest)
end

charge[RATE] = function(op, state)
  local from, from_rest = current_tat(state)
  if from < now + op.lead then from, from_rest = now + op.lead, 0 end
  local after, after_rest = add(from, from_rest, op.step, op.step_rest)
  local most, most_rest = op.max_tat, op.most_rest
  if is_later(from, from_rest, most, most_rest) then most, most_rest = from, from_rest end
  if most > NEVER then most, most_rest = NEVER, 1023 end
  if is_later(after, after_rest, most, most_rest) then after, after_rest = most, most_rest end
  state.tat, state.tat_rest = after, after_rest
end

save[RATE] = function(op, state)
  local value = pack('<dd', state.tat, state.tat_rest)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.ends, state.parole, state.strikes)
  end
  write_or_delete(state, max(state.tat + (state.tat_rest > 0 and 1 or 0), record_retained_until(op, state)), value)
end

encode_state[RATE] = function(state)
  return pack('<dd', state.tat, state.tat_rest)
end
