-- core/reservation.rs. A queue has a key of its own, after those of the operations. Its value is the time until which it is
-- kept, `last_at`, `charged_until`, `opens_to_forfeiters_at` and the number of reservations. Then come the reservations, 40 bytes
-- each: instant, caller, cost, end, and 1 if the caller is excused from returning; and the forfeits, 32 bytes each: end,
-- caller, cost, and 1 if the caller was late.

local RESERVATION_BYTES, FORFEIT_BYTES, QUEUE_HEADER_BYTES, NO_CALLER = 40, 32, 40, string.rep('\0', 8)

load_queue = function(op)
  -- `part` is the cost that may be reserved or, for a rate, the least time between the last reservation and this one.
  op.horizon, op.part, op.longest_spacing, op.burst_part, op.grace, op.is_kept, op.caller, op.presented =
    unpack('<ddddddc8d', bytes, op.rules_position)
  local queue = { key = op.queue_key, reservations = '', forfeits = '', last_at = 0, charged_until = 0, opens_to_forfeiters_at = 0 }
  local value = call('GET', op.queue_key)
  if value then
    queue.exists = true
    local kept_until, last_at, charged_until, opens_to_forfeiters_at, count = unpack('<ddddd', value)
    local forfeits_from = QUEUE_HEADER_BYTES + count * RESERVATION_BYTES + 1
    -- A value of another program is replaced.
    if #value <= QUEUE_HEADER_BYTES + MAX_RECORDS * RESERVATION_BYTES and forfeits_from <= #value + 1 then
      queue.kept_until, queue.last_at, queue.charged_until = kept_until, last_at, charged_until
      queue.opens_to_forfeiters_at = opens_to_forfeiters_at
      queue.reservations = string.sub(value, QUEUE_HEADER_BYTES + 1, forfeits_from - 1)
      queue.forfeits = string.sub(value, forfeits_from)
    end
  end
  op.queue = queue
end

local function count_reservations(queue)
  return #queue.reservations / RESERVATION_BYTES
end

local function read_reservation(queue, index)
  return unpack('<dc8ddd', queue.reservations, index * RESERVATION_BYTES + 1)
end

local function read_last_reservation(queue)
  return read_reservation(queue, count_reservations(queue) - 1)
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
local function find_caller(caller, records, size)
  if caller == NO_CALLER then return nil end
  local from = 1
  while true do
    local position = string.find(records, caller, from, true)
    if not position then return nil end
    if (position - 9) % size == 0 then return (position - 9) / size end
    from = position + 1
  end
end

-- Returns the index of the caller's forfeit, or nil; and its end, its cost, and 1 if the caller was late.
local function find_forfeit(queue, caller)
  local index = find_caller(caller, queue.forfeits, FORFEIT_BYTES)
  if not index then return nil end
  local ended_at, _, cost, was_late = unpack('<dc8dd', queue.forfeits, index * FORFEIT_BYTES + 1)
  return index, ended_at, cost, was_late
end

-- Replaces a forfeit by these bytes.
local function replace_forfeit(queue, index, replacement)
  local before = index * FORFEIT_BYTES
  queue.forfeits = string.sub(queue.forfeits, 1, before)
    .. replacement
    .. string.sub(queue.forfeits, before + FORFEIT_BYTES + 1)
  queue.changed = true
end

-- Adds the forfeit of a reservation whose grace has ended. There is none if the caller is excused, or if no room was kept.
local function forfeit(queue, at, caller, cost, ends_at, is_excused)
  if ends_at == at or is_excused == 1 then return end
  local index, _, most, was_late = find_forfeit(queue, caller)
  if index then replace_forfeit(queue, index, '') end
  queue.forfeits = queue.forfeits .. pack('<dc8dd', ends_at, caller, max(cost, most or 0), was_late or 0)
end

-- Removes the first reservations, except those in `kept`.
local function remove_first(queue, count, kept)
  if count == 0 then return end
  queue.reservations = table.concat(kept) .. string.sub(queue.reservations, count * RESERVATION_BYTES + 1)
  queue.changed = true
end

-- Forgets the oldest forfeit if there is no room for another record. Returns false if there is none to forget.
local function make_record_room(queue)
  if count_reservations(queue) + #queue.forfeits / FORFEIT_BYTES < MAX_RECORDS then return true end
  if queue.forfeits == '' then return false end
  queue.forfeits = string.sub(queue.forfeits, FORFEIT_BYTES + 1)
  return true
end

local GOOD, LATE, TOLD_LATER, BEHIND = 0, 1, 2, 3

-- Returns the right of the caller to a reservation.
local function standing_of(op)
  local index, ended_at, _, was_late = find_forfeit(op.queue, op.caller)
  if not index or op.is_kept == 0 then return GOOD end
  if op.presented > ended_at and op.presented <= now then return TOLD_LATER end
  return ended_at + LATENESS > now and was_late == 0 and LATE or BEHIND
end

-- Returns the time from now in which callers that are behind get no other reservation, after one of them got one until
-- `ends_at`.
local function wide_spacing(op, ends_at)
  if op.kind == RATE then return op.part * FORFEIT_HORIZONS end
  return min(ceil((ends_at - now) * FORFEIT_HORIZONS / max(op.part, 1)) * op.cost, NEVER)
end

-- Records what a caller has got by its standing: a reservation until `ends_at`.
local function note_standing(op, standing, ends_at)
  local queue = op.queue
  if standing == BEHIND then
    queue.opens_to_forfeiters_at = min(now + wide_spacing(op, ends_at), NEVER)
    return
  end
  local index, ended_at, cost = find_forfeit(queue, op.caller)
  if index then
    replace_forfeit(queue, index, standing == LATE and pack('<dc8dd', ended_at, op.caller, cost, 1) or '')
  end
end

-- Ends the forfeit of a caller that was just admitted, unless the call costs less.
local function pardon(op)
  local index, _, cost = find_forfeit(op.queue, op.caller)
  if index and op.cost > 0 and op.cost >= cost then replace_forfeit(op.queue, index, '') end
end

local function refresh_queue(op)
  local queue = op.queue
  if queue.reservations ~= '' then
    local at, _, _, ends_at = read_reservation(queue, 0)
    if (ends_at > at) ~= (op.is_kept == 1) then
      queue.reservations, queue.changed = '', true
    end
  end
  local latest = now + op.horizon * 2
  if queue.last_at > latest then
    local count = count_reservations(queue)
    while count > 0 and read_reservation(queue, count - 1) > latest do
      count = count - 1
    end
    queue.reservations = string.sub(queue.reservations, 1, count * RESERVATION_BYTES)
    queue.last_at = count > 0 and read_last_reservation(queue) or now
    queue.charged_until, queue.changed = min(queue.charged_until, queue.last_at), true
  end
  if queue.forfeits ~= '' then
    if unpack('<d', queue.forfeits, #queue.forfeits - FORFEIT_BYTES + 1) > latest then
      queue.forfeits, queue.changed = '', true
    end
  end
  local ended = 1
  local oldest = now - op.horizon * FORFEIT_HORIZONS
  while ended < #queue.forfeits and unpack('<d', queue.forfeits, ended) <= oldest do
    ended = ended + FORFEIT_BYTES
  end
  if ended > 1 then
    queue.forfeits, queue.changed = string.sub(queue.forfeits, ended), true
  end
  if queue.forfeits == '' then queue.opens_to_forfeiters_at = 0 end
end

-- Removes what has ended by now, up to `counted` after the grace for the calls that still count.
local function remove_ended(op, counted)
  local queue, index, kept = op.queue, 0, {}
  local count = count_reservations(queue)
  while index < count do
    local at, caller, cost, ends_at, is_excused = read_reservation(queue, index)
    if ends_at > now then break end
    if caller ~= NO_CALLER then
      forfeit(queue, at, caller, cost, ends_at, is_excused)
    elseif ends_at + counted > now then
      kept[#kept + 1] = string.sub(queue.reservations, index * RESERVATION_BYTES + 1, (index + 1) * RESERVATION_BYTES)
    end
    index = index + 1
  end
  if #kept < index then remove_first(queue, index, kept) end
end

-- Returns the cost of the reservations that may be used from `start` to `stop`.
local function cost_between(queue, start, stop)
  local total = 0
  for index = 0, count_reservations(queue) - 1 do
    local at, _, cost, ends_at = read_reservation(queue, index)
    if at < stop and ends_at > start then total = total + cost end
  end
  return total
end

local function total_cost(queue)
  local total = 0
  for index = 0, count_reservations(queue) - 1 do
    local _, _, cost = read_reservation(queue, index)
    total = total + cost
  end
  return total
end

-- Returns the cost that calls without a reservation leave free in a window: of all reservations, but not above the part,
-- unless more of them may be used within one window because they were given by other rules.
local function cost_in_window(op)
  local queue, total = op.queue, total_cost(op.queue)
  if op.is_kept == 0 then return 0 end
  if total <= op.part then return total end
  local following, together, most, count = 0, 0, op.part, count_reservations(queue)
  for index = 0, count - 1 do
    local _, _, first_cost, ends_at = read_reservation(queue, index)
    while following < count do
      local at, _, cost = read_reservation(queue, following)
      if at >= ends_at + op.window then break end
      together, following = together + cost, following + 1
    end
    most = max(most, together)
    together = together - first_cost
  end
  return min(most, total)
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
  local held, charged, ended = 0, 0, 0
  local count = count_reservations(queue)
  while charged < count do
    local at, _, cost = read_reservation(queue, charged)
    if at > queue.charged_until then break end
    held, charged = held + cost, charged + 1
  end
  while true do
    local next_at, next_cost = now, nil
    if charged < count then
      local at, _, cost = read_reservation(queue, charged)
      if at <= now then
        next_at, next_cost = at, cost
      end
    end
    local first_at, caller, first_cost, ends_at, is_excused
    if ended < count then
      first_at, caller, first_cost, ends_at, is_excused = read_reservation(queue, ended)
    end
    if ends_at and ends_at <= next_at then
      hold(op, state, held, ends_at)
      local time, rest = time_of_cost(op, first_cost)
      state.tat, state.tat_rest = state.tat - time, state.tat_rest - rest
      if state.tat_rest < 0 then state.tat, state.tat_rest = state.tat - 1, state.tat_rest + 1024 end
      if state.tat < ends_at then state.tat, state.tat_rest = ends_at, 0 end
      held, ended, state.changed = held - first_cost, ended + 1, true
      forfeit(queue, first_at, caller, first_cost, ends_at, is_excused)
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
  remove_first(queue, ended, {})
end

-- Evaluates a call without a reservation. Sets `op.free_at` if it has no room.
local evaluate_unreserved = {}

evaluate_unreserved[RATE] = function(op, state)
  if op.is_kept == 1 then
    advance_rate(op, state)
  else
    remove_ended(op, 0)
  end
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
  local last_at = read_last_reservation(queue)
  op.free_at = max(fits and now or op.free_at, min(last_at + ceil_time_of_cost(op, op.cost), NEVER))
  return false
end

-- Evaluates a limit of which `held` is kept for others. If that leaves too little, there is room at `ends_at`.
local function evaluate_with_held(op, state, held, ends_at)
  local cost = op.cost
  op.held, op.cost = held, cost == 0 and 0 or cost + held
  local fits = evaluate[op.kind](op, state)
  if op.exceeds_capacity == 0 and op.cost > op.limit then
    fits, op.free_at = false, ends_at
  end
  op.cost = cost
  return fits
end

evaluate_unreserved[WINDOW] = function(op, state)
  local queue = op.queue
  evaluate[WINDOW](op, state)
  remove_ended(op, op.window)
  op.reserved_until = 0
  if queue.reservations ~= '' then
    local _, _, _, ends_at = read_last_reservation(queue)
    op.reserved_until = ends_at + op.window
  end
  return evaluate_with_held(op, state, cost_in_window(op), op.reserved_until)
end

evaluate_unreserved[QUOTA] = function(op, state)
  remove_ended(op, 0)
  op.reserved_until = 0
  local held = op.is_kept == 1 and cost_between(op.queue, op.period_start, op.period_end) or 0
  return evaluate_with_held(op, state, held, op.period_end)
end

-- Returns true if the call has room, by its reservation or without one. `op.found` tells both, the time of the room, the
-- caller's reservation, what is kept for others, and until when.
evaluate_reserved = function(op, state)
  refresh_queue(op)
  local fits = evaluate_unreserved[op.kind](op, state)
  local free_at, reserved_at, is_admitted = fits and now or op.free_at, 0, fits
  op.own = find_caller(op.caller, op.queue.reservations, RESERVATION_BYTES)
  if op.own then
    local at, _, cost = read_reservation(op.queue, op.own)
    if op.is_kept == 1 and op.presented < NEVER and at <= now and op.cost > 0 and op.cost <= cost then
      free_at, reserved_at, is_admitted = now, at, true
    else
      if at > now then op.upcoming = op.own end
      op.own = nil
      if not fits and op.upcoming then
        free_at, reserved_at = at, op.is_kept * at
      end
    end
  end
  op.found =
    pack('<dddddd', fits and 1 or 0, is_admitted and 1 or 0, free_at, reserved_at, op.held, op.reserved_until)
  return is_admitted
end

charge_reserved = function(op, state)
  pardon(op)
  if not op.own then
    local at, caller, cost, ends_at
    if op.upcoming then
      at, caller, cost, ends_at = read_reservation(op.queue, op.upcoming)
    end
    -- A cheaper call isn't the one that was refused.
    if op.upcoming and op.cost >= cost then
      replace_reservation(op.queue, op.upcoming, pack('<dc8ddd', at, caller, cost, ends_at, 1))
    end
    charge[op.kind](op, state)
    state.changed = true
  elseif op.kind == WINDOW then
    local at, _, cost, ends_at, is_excused = read_reservation(op.queue, op.own)
    replace_reservation(op.queue, op.own, pack('<dc8ddd', at, NO_CALLER, cost, ends_at, is_excused))
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
  if op.is_kept == 1 and op.cost > op.burst_part then return nil end
  local at = time_of_room(op, state, op.cost)
  if queue.last_at > 0 then at = max(at, queue.last_at + op.part) end
  local together, index = op.cost, count_reservations(queue) - 1
  while op.is_kept == 1 and index >= 0 do
    local _, _, cost, ends_at = read_reservation(queue, index)
    together = together + cost
    if together > op.burst_part then at = max(at, ends_at + ceil_time_of_cost(op, together - op.burst_part)) end
    index = index - 1
  end
  return at
end

next_instant[WINDOW] = function(op, state)
  local queue = op.queue
  local reserved = total_cost(queue) + op.cost
  if op.is_kept == 0 then
    local ahead, limit = reserved - 1, max(op.limit, 1)
    return time_of_room(op, state, ahead % limit + 1) + op.window * floor(ahead / limit)
  end
  if op.cost > op.part then return nil end
  local excess, index, free_at = reserved - op.part, 0, now
  while excess > 0 and index < count_reservations(queue) do
    local _, _, cost, ends_at = read_reservation(queue, index)
    excess, index, free_at = excess - cost, index + 1, ends_at + op.window
  end
  local together = min(reserved, max(op.part, cost_in_window(op)))
  return max(time_of_room(op, state, together), free_at)
end

next_instant[QUOTA] = function(op)
  local reserved = cost_between(op.queue, op.period_end, op.next_period_end)
  if op.queue.last_at > op.period_end or op.is_kept == 1 and reserved + op.cost > op.part then return nil end
  return op.period_end
end

-- Gives the refused caller the next free instant. Returns it, or 0.
reserve = function(op, state)
  local queue = op.queue
  if op.caller == NO_CALLER or op.cost == 0 or op.exceeds_capacity == 1 then return 0 end
  if find_caller(op.caller, queue.reservations, RESERVATION_BYTES) then return 0 end
  local standing = standing_of(op)
  if standing == BEHIND and now < queue.opens_to_forfeiters_at then return 0 end
  local at = next_instant[op.kind](op, state)
  if not at then return 0 end
  at = max(at, queue.last_at)
  if at <= now or at - now > op.horizon or not make_record_room(queue) then return 0 end
  local ends_at = at + op.is_kept * op.grace
  if queue.reservations ~= '' then
    local _, _, _, last_ends_at = read_last_reservation(queue)
    ends_at = max(ends_at, last_ends_at)
  end
  queue.reservations = queue.reservations .. pack('<dc8ddd', at, op.caller, op.cost, ends_at, 0)
  if standing ~= GOOD then note_standing(op, standing, ends_at) end
  queue.last_at, queue.changed = at, true
  return at
end

save_queue = function(op)
  local queue = op.queue
  if not queue.changed then return end
  local idle_at, count = queue.last_at, count_reservations(queue)
  if count > 0 then
    local _, _, _, ends_at = read_last_reservation(queue)
    idle_at = max(idle_at, ends_at + op.is_kept * op.horizon * FORFEIT_HORIZONS)
    if op.kind == WINDOW then idle_at = max(idle_at, ends_at + op.window) end
  end
  if queue.forfeits ~= '' then
    local last_ended_at = unpack('<d', queue.forfeits, #queue.forfeits - FORFEIT_BYTES + 1)
    idle_at = max(idle_at, last_ended_at + op.horizon * FORFEIT_HORIZONS)
  end
  if queue.last_at > 0 and op.kind == RATE then idle_at = max(idle_at, queue.last_at + op.longest_spacing) end
  local value = pack('<dddd', queue.last_at, queue.charged_until, queue.opens_to_forfeiters_at, count)
    .. queue.reservations .. queue.forfeits
  write_or_delete(queue, idle_at, value)
end
