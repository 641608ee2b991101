-- core/rate.rs. An arrival time (`tat`) has 62 bits, in units of 1/1024 µs: more than a double counts. So it is kept as
-- whole microseconds and, apart, the units beyond them (`_rest`). The same holds for costs and refills.

load[RATE] = function(state)
  state.kept_until, state.tat, state.tat_rest = unpack('<ddd', read_value(state, 24))
end

local function is_later(a, a_rest, b, b_rest)
  return a > b or (a == b and a_rest > b_rest)
end

local function add(a, a_rest, b, b_rest)
  local rest = a_rest + b_rest
  if rest >= 1024 then return a + b + 1, rest - 1024 end
  return a + b, rest
end

-- Returns the arrival time as it counts now.
local function current_tat(state)
  if state.tat < now then return now, 0 end
  return state.tat, state.tat_rest
end

evaluate[RATE] = function(op, state)
  op.cost_time, op.cost_rest, op.refill, op.refill_rest, op.burst, op.spacing, op.spacing_rest, op.lead =
    unpack('<dddddddd', bytes, op.position)
  op.max_tat, op.max_tat_rest = add(now + op.refill, op.refill_rest, op.refill, op.refill_rest)
  if is_later(state.tat, state.tat_rest, op.max_tat + MAX_CLOCK_LAG, op.max_tat_rest) then
    state.tat, state.tat_rest = now + op.refill, op.refill_rest
    state.changed = true
  end
  local tat, tat_rest = current_tat(state)
  local next_tat, next_rest = add(tat, tat_rest, op.cost_time, op.cost_rest)
  if op.exceeds_capacity == 1 then
    op.free_at = NEVER
    return false
  end
  if op.cost == 0 or not is_later(next_tat, next_rest, now + op.refill, op.refill_rest) then return true end
  op.free_at = next_tat - op.refill + (next_rest > op.refill_rest and 1 or 0)
  return false
end

-- The room covers a parole if free ÷ spacing >= parole.
has_room_for_parole[RATE] = function(op, state)
  if state.parole > op.burst then return false end
  local tat, tat_rest = current_tat(state)
  local rest = op.spacing_rest * state.parole
  local carry = floor(rest / 1024)
  local next_tat, next_rest = add(tat, tat_rest, op.spacing * state.parole + carry, rest - carry * 1024)
  return not is_later(next_tat, next_rest, now + op.refill, op.refill_rest)
end

charge[RATE] = function(op, state)
  local tat, tat_rest = current_tat(state)
  if tat < now + op.lead then tat, tat_rest = now + op.lead, 0 end
  local next_tat, next_rest = add(tat, tat_rest, op.cost_time, op.cost_rest)
  local max_tat, max_rest = op.max_tat, op.max_tat_rest
  if is_later(tat, tat_rest, max_tat, max_rest) then max_tat, max_rest = tat, tat_rest end
  if max_tat > NEVER then max_tat, max_rest = NEVER, 1023 end
  if is_later(next_tat, next_rest, max_tat, max_rest) then next_tat, next_rest = max_tat, max_rest end
  state.tat, state.tat_rest = next_tat, next_rest
end

save[RATE] = function(op, state)
  write_value(op, state, state.tat + (state.tat_rest > 0 and 1 or 0))
end

encode_state[RATE] = function(state)
  return pack('<dd', state.tat, state.tat_rest)
end
