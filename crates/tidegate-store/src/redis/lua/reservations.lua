-- core/reservation.rs. A queue has a key of its own, after those of the operations. Its value is the time until which it is
-- kept, `last_at`, `charged_until` and the number of reservations. Then come the reservations, 24 bytes each: instant,
-- caller and cost; and the forfeits, 16 bytes each: end and caller.

local RESERVATION_BYTES, FORFEIT_BYTES, QUEUE_HEADER_BYTES, NO_CALLER = 24, 16, 32, string.rep('\0', 8)

load_queue = function(op)
  -- `part` is the cost that may be reserved or, for a rate, the least time between the last reservation and this one.
  op.horizon, op.part, op.spacing_of_one, op.grace, op.is_kept, op.caller, op.presented =
    unpack('<dddddc8d', bytes, op.rules_position)
  local queue = { key = op.queue_key, reservations = '', forfeits = '', last_at = 0, charged_until = 0 }
  local value = call('GET', op.queue_key)
  if value then
    local count
    queue.exists = true
    queue.kept_until, queue.last_at, queue.charged_until, count = unpack('<dddd', value)
    local forfeits_from = QUEUE_HEADER_BYTES + count * RESERVATION_BYTES + 1
    queue.reservations = string.sub(value, QUEUE_HEADER_BYTES + 1, forfeits_from - 1)
    queue.forfeits = string.sub(value, forfeits_from)
  end
  op.queue = queue
end

local function count_reservations(queue)
  return #queue.reservations / RESERVATION_BYTES
end

local function read_reservation(queue, index)
  return unpack('<dc8d', queue.reservations, index * RESERVATION_BYTES + 1)
end

-- Replaces a reservation by these bytes.
local function replace_reservation(queue, index, replacement)
  local before = index * RESERVATION_BYTES
  queue.reservations = string.sub(queue.reservations, 1, before)
    .. replacement
    .. string.sub(queue.reservations, before + RESERVATION_BYTES + 1)
  queue.changed = true
end

-- Returns the index of the first record of the caller, or nil. Its records have `size` bytes, of which the caller has the
-- second eight.
local function find_caller(op, records, size)
  if op.caller == NO_CALLER then return nil end
  local from = 1
  while true do
    local position = string.find(records, op.caller, from, true)
    if not position then return nil end
    if (position - 9) % size == 0 then return (position - 9) / size end
    from = position + 1
  end
end

local function forfeit(op, index)
  local at, caller = read_reservation(op.queue, index)
  replace_reservation(op.queue, index, '')
  op.queue.forfeits = op.queue.forfeits .. pack('<dc8', at + op.horizon * FORFEIT_HORIZONS, caller)
end

local function refresh_queue(op)
  local queue = op.queue
  local latest = now + op.horizon + MAX_CLOCK_LAG
  if queue.charged_until > now + MAX_CLOCK_LAG or queue.last_at > latest then
    queue.reservations, queue.charged_until, queue.last_at, queue.changed = '', now, now, true
  end
  if queue.forfeits ~= '' then
    latest = latest + op.horizon * FORFEIT_HORIZONS
    if unpack('<d', queue.forfeits, #queue.forfeits - FORFEIT_BYTES + 1) > latest then
      queue.forfeits, queue.changed = '', true
    end
  end
  local ended = 1
  while ended < #queue.forfeits and unpack('<d', queue.forfeits, ended) <= now do
    ended = ended + FORFEIT_BYTES
  end
  if ended > 1 then
    queue.forfeits, queue.changed = string.sub(queue.forfeits, ended), true
  end
  if op.is_kept == 0 then
    while queue.reservations ~= '' and read_reservation(queue, 0) <= now do
      replace_reservation(queue, 0, '')
    end
  end
end

-- Removes what has ended by now, up to `counted` after the grace for the calls that still count.
local function remove_ended(op, counted)
  local queue, index = op.queue, 0
  while index < count_reservations(queue) do
    local at, caller = read_reservation(queue, index)
    if at + op.grace > now then break end
    if caller ~= NO_CALLER then
      forfeit(op, index)
    elseif at + op.grace + counted > now then
      index = index + 1
    else
      replace_reservation(queue, index, '')
    end
  end
end

-- Returns the cost of the reservations that may be used from `start` to `stop`, up to `grace` after their instants.
local function cost_between(queue, start, stop, grace)
  local total = 0
  for index = 0, count_reservations(queue) - 1 do
    local at, _, cost = read_reservation(queue, index)
    if at < stop and at + grace > start then total = total + cost end
  end
  return total
end

-- Returns the time of a cost as microseconds and the units beyond them.
local function time_of_cost(op, cost)
  local rest = op.spacing_rest * cost
  local carry = floor(rest / 1024)
  return op.spacing * cost + carry, rest - carry * 1024
end

local function ceil_time_of_cost(op, cost)
  local time, rest = time_of_cost(op, cost)
  return time + (rest > 0 and 1 or 0)
end

-- Moves the arrival time to at least `cost` after `at`.
local function hold(op, state, cost, at)
  if cost == 0 then return end
  local time, rest = time_of_cost(op, cost)
  if is_later(at + time, rest, state.tat, state.tat_rest) then
    state.tat, state.tat_rest, state.changed = at + time, rest, true
  end
end

local function advance_rate(op, state)
  local queue = op.queue
  evaluate[RATE](op, state)
  local held, charged = 0, 0
  while charged < count_reservations(queue) do
    local at, _, cost = read_reservation(queue, charged)
    if at > queue.charged_until then break end
    held, charged = held + cost, charged + 1
  end
  while true do
    local next_at, ends_at, first_cost, next_cost = now, nil, nil, nil
    if charged < count_reservations(queue) then
      local at, _, cost = read_reservation(queue, charged)
      if at <= now then
        next_at, next_cost = at, cost
      end
    end
    if queue.reservations ~= '' then
      local at, _, cost = read_reservation(queue, 0)
      ends_at, first_cost = at + op.grace, cost
    end
    if ends_at and ends_at <= next_at then
      hold(op, state, held, ends_at)
      local time, rest = time_of_cost(op, first_cost)
      state.tat, state.tat_rest = state.tat - time, state.tat_rest - rest
      if state.tat_rest < 0 then state.tat, state.tat_rest = state.tat - 1, state.tat_rest + 1024 end
      if state.tat < ends_at then state.tat, state.tat_rest = ends_at, 0 end
      held, charged, state.changed = held - first_cost, charged - 1, true
      forfeit(op, 0)
    elseif next_cost then
      hold(op, state, held, next_at)
      local time, rest = time_of_cost(op, next_cost)
      if state.tat < next_at then state.tat, state.tat_rest = next_at, 0 end
      state.tat, state.tat_rest = add(state.tat, state.tat_rest, time, rest)
      held, charged, state.changed = held + next_cost, charged + 1, true
      queue.charged_until, queue.changed = next_at, true
    else
      break
    end
  end
  hold(op, state, held, now)
end

-- Evaluates a call without a reservation. Sets `op.free_at` if it has no room.
local evaluate_walk_in = {}

evaluate_walk_in[RATE] = function(op, state)
  advance_rate(op, state)
  local queue = op.queue
  local fits = evaluate[RATE](op, state)
  op.held, op.reserved_until = 0, 0
  local count = count_reservations(queue)
  local first = 0
  while first < count and read_reservation(queue, first) <= now do
    first = first + 1
  end
  if op.is_kept == 0 or op.cost == 0 or first == count then return fits end
  if fits then
    local at, _, cost = read_reservation(queue, first)
    local tat, rest = current_tat(state)
    tat, rest = add(tat, rest, op.cost_time, op.cost_rest)
    if tat < at then tat, rest = at, 0 end
    tat, rest = add(tat, rest, time_of_cost(op, cost))
    if not is_later(tat, rest, at + op.refill, op.refill_rest) then return true end
  end
  local last_at = read_reservation(queue, count - 1)
  op.free_at = max(fits and now or op.free_at, min(last_at + ceil_time_of_cost(op, op.cost), NEVER))
  return false
end

-- Evaluates a limit of which `held` is kept for others. If that leaves too little, there is room at `ends_at`.
local function evaluate_with_held(op, state, held, ends_at)
  local cost = op.cost
  op.held, op.cost = held, cost + held
  local fits = evaluate[op.kind](op, state)
  if op.exceeds_capacity == 0 and op.cost > op.limit then
    fits, op.free_at = false, ends_at
  end
  op.cost = cost
  return fits
end

evaluate_walk_in[WINDOW] = function(op, state)
  local queue = op.queue
  evaluate[WINDOW](op, state)
  remove_ended(op, op.window)
  local held = op.is_kept == 1 and min(cost_between(queue, 0, NEVER, op.grace), op.part) or 0
  local last = count_reservations(queue) - 1
  op.reserved_until = last >= 0 and read_reservation(queue, last) + op.grace + op.window or 0
  return evaluate_with_held(op, state, held, queue.last_at + op.grace + op.window)
end

evaluate_walk_in[QUOTA] = function(op, state)
  remove_ended(op, 0)
  op.reserved_until = 0
  local held = op.is_kept == 1 and cost_between(op.queue, op.period_start, op.period_end, op.grace) or 0
  return evaluate_with_held(op, state, held, op.period_end)
end

-- Returns true if the call has room, by its reservation or without one. `op.found` tells both, the time of the room, the
-- caller's reservation, what is kept for others, and until when.
evaluate_reserved = function(op, state)
  refresh_queue(op)
  local fits = evaluate_walk_in[op.kind](op, state)
  local free_at, reserved_at, is_admitted = fits and now or op.free_at, 0, fits
  op.own = find_caller(op, op.queue.reservations, RESERVATION_BYTES)
  if op.own then
    local at, _, cost = read_reservation(op.queue, op.own)
    local is_presented = op.presented == 0 or op.presented == at
    if op.is_kept == 1 and is_presented and at <= now and op.cost <= cost then
      free_at, reserved_at, is_admitted = now, at, true
    else
      op.own = nil
      if not fits and at > now then
        free_at, reserved_at = at, op.is_kept * at
      end
    end
  end
  op.found =
    pack('<dddddd', fits and 1 or 0, is_admitted and 1 or 0, free_at, reserved_at, op.held, op.reserved_until)
  return is_admitted
end

charge_reserved = function(op, state)
  if not op.own then
    charge[op.kind](op, state)
    state.changed = true
  elseif op.kind == WINDOW then
    local at, _, cost = read_reservation(op.queue, op.own)
    replace_reservation(op.queue, op.own, pack('<dc8d', at, NO_CALLER, cost))
  else
    replace_reservation(op.queue, op.own, '')
    if op.kind == QUOTA then
      charge[QUOTA](op, state)
      state.changed = true
    end
  end
end

-- Returns the time at which a cost has room in a window or a rate.
local function time_of_room(op, state, cost)
  local own_cost = op.cost
  op.cost = cost
  local at = evaluate[op.kind](op, state) and now or op.free_at
  op.cost = own_cost
  return at
end

local next_instant = {}

next_instant[RATE] = function(op, state)
  local queue = op.queue
  local at = time_of_room(op, state, op.cost)
  if queue.last_at > 0 then at = max(at, queue.last_at + op.part) end
  local together, index = op.cost, count_reservations(queue) - 1
  while op.is_kept == 1 and index >= 0 do
    local earlier_at, _, cost = read_reservation(queue, index)
    together = together + cost
    if together > op.burst then
      return max(at, earlier_at + op.grace + ceil_time_of_cost(op, together - op.burst))
    end
    index = index - 1
  end
  return at
end

next_instant[WINDOW] = function(op, state)
  local queue = op.queue
  local reserved = cost_between(queue, 0, NEVER, op.grace) + op.cost
  if op.is_kept == 0 then
    local ahead, limit = reserved - 1, max(op.limit, 1)
    return time_of_room(op, state, ahead % limit + 1) + op.window * floor(ahead / limit)
  end
  if op.cost > op.part then return nil end
  local excess, index, free_at = reserved - op.part, 0, now
  while excess > 0 and index < count_reservations(queue) do
    local at, _, cost = read_reservation(queue, index)
    excess, index, free_at = excess - cost, index + 1, at + op.grace + op.window
  end
  return max(time_of_room(op, state, min(reserved, op.part)), free_at, queue.last_at)
end

next_instant[QUOTA] = function(op)
  local reserved = cost_between(op.queue, op.period_end, op.next_period_end, op.grace)
  if op.is_kept == 1 and reserved + op.cost > op.part then return nil end
  return op.period_end
end

-- Gives the refused caller the next free instant. Returns it, or 0.
reserve = function(op, state)
  local queue = op.queue
  local has_room = count_reservations(queue) + #queue.forfeits / FORFEIT_BYTES < MAX_RECORDS
  if op.caller == NO_CALLER or op.cost == 0 or op.exceeds_capacity == 1 or not has_room then return 0 end
  if find_caller(op, queue.reservations, RESERVATION_BYTES) or find_caller(op, queue.forfeits, FORFEIT_BYTES) then return 0 end
  local at = next_instant[op.kind](op, state)
  if not at or at <= now or at - now > op.horizon then return 0 end
  queue.reservations = queue.reservations .. pack('<dc8d', at, op.caller, op.cost)
  queue.last_at, queue.changed = at, true
  return at
end

save_queue = function(op)
  local queue = op.queue
  if not queue.changed then return end
  local idle_at, count = 0, count_reservations(queue)
  if count > 0 then
    idle_at = read_reservation(queue, count - 1) + (op.is_kept == 1 and op.horizon * FORFEIT_HORIZONS or 0)
  end
  if queue.forfeits ~= '' then
    idle_at = max(idle_at, (unpack('<d', queue.forfeits, #queue.forfeits - FORFEIT_BYTES + 1)))
  end
  if queue.last_at > 0 and op.kind == WINDOW then idle_at = max(idle_at, queue.last_at + op.grace + op.window) end
  if queue.last_at > 0 and op.kind == RATE then idle_at = max(idle_at, queue.last_at + op.spacing_of_one) end
  local value = pack('<ddd', queue.last_at, queue.charged_until, count) .. queue.reservations .. queue.forfeits
  write_or_delete(queue, idle_at, value)
end
