-- core/reservation.rs. A queue has a key of its own, after those of the operations: a hash, of which a decision reads and writes
-- only what it needs, however many reservations there are. Its fields:
--
-- - `q`: the header (`HEADER_FIELDS`).
-- - A number: the reservation of this number, and the numbers of the ones before and after it. 0 means none.
-- - `c` and a caller: the number of its reservation.
-- - `f` and a caller: its forfeit, and the callers of the ones before and after it.
--
-- A mark divides the reservations: `number` is the first one behind it, or 0, and `sum` the cost of those before. It is kept, so
-- that the next decision finds it near its place. Which reservations are before a mark depends on the kind of the limit:
--
-- - RATE: for the first mark those that the rate is charged for, for the second those that are passed.
-- - WINDOW: those that have ended, and those that must end before the next one.
-- - QUOTA: those whose instants are before the end of the period, and those that end by then.

local HEADER_FORMAT, RESERVATION_FORMAT, FORFEIT_FORMAT = '<dddddddddddddddddddc8c8', '<dc8ddddd', '<dddc8c8'
local HEADER_BYTES, NO_CALLER = 168, string.rep('\0', 8)

local function number_field(number)
  return pack('<d', number)
end

local function read_reservation(value)
  local at, caller, cost, ends_at, is_excused, before, after = unpack(RESERVATION_FORMAT, value)
  return { at = at, caller = caller, cost = cost, ends_at = ends_at, is_excused = is_excused, before = before, after = after }
end

local function read_forfeit(value)
  local ended_at, cost, was_late, before, after = unpack(FORFEIT_FORMAT, value)
  return { ended_at = ended_at, cost = cost, was_late = was_late, before = before, after = after }
end

-- Reads the header.
load_queue = function(op)
  -- `part` is the cost that may be reserved or, for a rate, the least time between the last reservation and this one.
  op.horizon, op.part, op.longest_spacing, op.burst_part, op.grace, op.is_kept, op.caller, op.presented =
    unpack('<ddddddc8d', bytes, op.rules_position)
  local queue = {
    key = op.queue_key, last_at = 0, charged_until = 0, opens_to_forfeiters_at = 0, next_number = 1, first = 0, last = 0,
    count = 0, total = 0, forfeit_count = 0, passed_until = 0, passed_rest = 0, part = 0, window = 0, mixed_until = 0,
    first_forfeit = NO_CALLER, last_forfeit = NO_CALLER, marks = { { number = 0, sum = 0 }, { number = 0, sum = 0 } },
    reservations = {}, numbers = {}, forfeits = {}, edits = {},
  }
  op.queue = queue
  local header = redis.pcall('HGET', queue.key, 'q')
  if type(header) == 'table' and string.sub(header.err, 1, 9) ~= 'WRONGTYPE' then call('HGET', queue.key, 'q') end
  if not header then return end
  if #header ~= HEADER_BYTES then
    -- A value of another program is replaced.
    queue.is_foreign = true
    return
  end
  local first, second = queue.marks[1], queue.marks[2]
  queue.exists = true
  queue.kept_until, queue.last_at, queue.charged_until, queue.opens_to_forfeiters_at, queue.next_number, queue.first,
    queue.last, queue.count, queue.total, queue.forfeit_count, first.number, first.sum, second.number, second.sum,
    queue.passed_until, queue.passed_rest, queue.part, queue.window, queue.mixed_until, queue.first_forfeit,
    queue.last_forfeit = unpack(HEADER_FORMAT, header)
end

-- Returns the reservation of this number, or nil.
local function reservation_of(queue, number)
  if number == 0 then return nil end
  local found = queue.reservations[number]
  if found == nil then
    local value = call('HGET', queue.key, number_field(number))
    found = value and read_reservation(value) or false
    queue.reservations[number] = found
  end
  return found or nil
end

-- Returns the number of the caller's reservation, or nil.
local function number_of(queue, caller)
  if caller == NO_CALLER or queue.count == 0 then return nil end
  local found = queue.numbers[caller]
  if found == nil then
    local value = call('HGET', queue.key, 'c' .. caller)
    found = value and unpack('<d', value) or false
    queue.numbers[caller] = found
  end
  return found or nil
end

-- Returns the caller's forfeit, or nil.
local function forfeit_of(queue, caller)
  if caller == NO_CALLER or queue.forfeit_count == 0 then return nil end
  local found = queue.forfeits[caller]
  if found == nil then
    local value = call('HGET', queue.key, 'f' .. caller)
    found = value and read_forfeit(value) or false
    queue.forfeits[caller] = found
  end
  return found or nil
end

local function edit_reservation(queue, number, reservation)
  queue.reservations[number], queue.edits[number_field(number)] = reservation, true
  queue.changed = true
end

local function edit_forfeit(queue, caller, forfeit)
  queue.forfeits[caller], queue.edits['f' .. caller] = forfeit, true
  queue.changed = true
end

local function edit_number(queue, caller, number)
  if caller == NO_CALLER then return end
  queue.numbers[caller], queue.edits['c' .. caller] = number, true
  queue.changed = true
end

local function forget_passed(queue)
  queue.passed_until, queue.passed_rest, queue.changed = 0, 0, true
end

local function remove_reservation(op, number)
  local queue = op.queue
  local removed = reservation_of(queue, number)
  local before, after = reservation_of(queue, removed.before), reservation_of(queue, removed.after)
  if before then
    before.after = removed.after
    edit_reservation(queue, removed.before, before)
  else
    queue.first = removed.after
  end
  if after then
    after.before = removed.before
    edit_reservation(queue, removed.after, after)
  else
    queue.last = removed.before
  end
  for _, mark in ipairs(queue.marks) do
    if mark.number == number then
      mark.number = removed.after
    elseif mark.number == 0 or number < mark.number then
      mark.sum = mark.sum - removed.cost
    end
  end
  if op.kind == RATE and queue.marks[2].sum == 0 then forget_passed(queue) end
  queue.count, queue.total = queue.count - 1, queue.total - removed.cost
  edit_number(queue, removed.caller, false)
  edit_reservation(queue, number, false)
end

local function add_reservation(queue, at, caller, cost, ends_at)
  local number = queue.next_number
  local last = reservation_of(queue, queue.last)
  if last then
    last.after = number
    edit_reservation(queue, queue.last, last)
  else
    queue.first = number
  end
  local added = { at = at, caller = caller, cost = cost, ends_at = ends_at, is_excused = 0, before = queue.last, after = 0 }
  edit_reservation(queue, number, added)
  edit_number(queue, caller, number)
  for _, mark in ipairs(queue.marks) do
    if mark.number == 0 then mark.number = number end
  end
  queue.last, queue.next_number, queue.last_at = number, number + 1, at
  queue.count, queue.total = queue.count + 1, queue.total + cost
end

-- Moves a mark until `is_before` is true for the reservations before it and no others. It gets the reservation and the cost of
-- those before that.
local function seek(queue, mark, is_before)
  local start = mark.number
  while true do
    local reservation = reservation_of(queue, mark.number)
    if not (reservation and is_before(reservation, mark.sum)) then break end
    mark.number, mark.sum = reservation.after, mark.sum + reservation.cost
  end
  while mark.sum > 0 do
    local behind = reservation_of(queue, mark.number)
    local number = behind and behind.before or queue.last
    local reservation = reservation_of(queue, number)
    if not reservation or is_before(reservation, mark.sum - reservation.cost) then break end
    mark.number, mark.sum = number, mark.sum - reservation.cost
  end
  if mark.number ~= start then queue.changed = true end
  return mark
end

local function copy_mark(mark)
  return { number = mark.number, sum = mark.sum }
end

-- Returns the last reservation before a mark, or nil.
local function last_before(queue, mark)
  local behind = reservation_of(queue, mark.number)
  return reservation_of(queue, behind and behind.before or queue.last)
end

local function remove_forfeit(queue, caller)
  local removed = forfeit_of(queue, caller)
  if not removed then return end
  local before, after = forfeit_of(queue, removed.before), forfeit_of(queue, removed.after)
  if before then
    before.after = removed.after
    edit_forfeit(queue, removed.before, before)
  else
    queue.first_forfeit = removed.after
  end
  if after then
    after.before = removed.before
    edit_forfeit(queue, removed.after, after)
  else
    queue.last_forfeit = removed.before
  end
  queue.forfeit_count = queue.forfeit_count - 1
  edit_forfeit(queue, caller, false)
end

-- Removes a reservation whose grace has ended. Its caller forfeits, unless it is excused, or no room was kept.
local function forfeit(op, number)
  local queue = op.queue
  local ended = reservation_of(queue, number)
  remove_reservation(op, number)
  if ended.ends_at == ended.at or ended.is_excused == 1 then return end
  local earlier = forfeit_of(queue, ended.caller)
  remove_forfeit(queue, ended.caller)
  local last = forfeit_of(queue, queue.last_forfeit)
  if last then
    last.after = ended.caller
    edit_forfeit(queue, queue.last_forfeit, last)
  else
    queue.first_forfeit = ended.caller
  end
  edit_forfeit(queue, ended.caller, {
    ended_at = ended.ends_at,
    cost = max(ended.cost, earlier and earlier.cost or 0),
    was_late = earlier and earlier.was_late or 0,
    before = queue.last_forfeit,
    after = NO_CALLER,
  })
  queue.last_forfeit, queue.forfeit_count = ended.caller, queue.forfeit_count + 1
end

-- Forgets the oldest forfeit if there is no room for another record. Returns false if there is none to forget.
local function make_record_room(queue)
  if queue.count + queue.forfeit_count < MAX_RECORDS then return true end
  if queue.forfeit_count == 0 then return false end
  remove_forfeit(queue, queue.first_forfeit)
  return true
end

local GOOD, LATE, TOLD_LATER, BEHIND = 0, 1, 2, 3

-- Returns the right of the caller to a reservation.
local function standing_of(op)
  local found = forfeit_of(op.queue, op.caller)
  if not found or op.is_kept == 0 then return GOOD end
  if op.presented > found.ended_at and op.presented <= now then return TOLD_LATER end
  return found.ended_at + LATENESS > now and found.was_late == 0 and LATE or BEHIND
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
  elseif standing == TOLD_LATER then
    remove_forfeit(queue, op.caller)
  elseif standing == LATE then
    local own = forfeit_of(queue, op.caller)
    if own then
      own.was_late = 1
      edit_forfeit(queue, op.caller, own)
    end
  end
end

-- Ends the forfeit of a caller that was just admitted, unless the call costs less.
local function end_forfeits(op)
  local found = forfeit_of(op.queue, op.caller)
  if found and op.cost > 0 and op.cost >= found.cost then remove_forfeit(op.queue, op.caller) end
end

local function refresh_queue(op)
  local queue = op.queue
  local first = reservation_of(queue, queue.first)
  if first and (first.ends_at > first.at) ~= (op.is_kept == 1) then
    while queue.first ~= 0 do
      remove_reservation(op, queue.first)
    end
  end
  local latest = now + op.horizon * 2
  if queue.last_at > latest then
    local last = reservation_of(queue, queue.last)
    while last and last.at > latest do
      remove_reservation(op, queue.last)
      last = reservation_of(queue, queue.last)
    end
    queue.last_at = last and last.at or now
    queue.charged_until, queue.changed = min(queue.charged_until, queue.last_at), true
    if op.kind == RATE then
      queue.marks[2] = { number = queue.first, sum = 0 }
      forget_passed(queue)
    end
  end
  local last_forfeit = forfeit_of(queue, queue.last_forfeit)
  local is_ahead = last_forfeit and last_forfeit.ended_at > latest
  local oldest = is_ahead and math.huge or now - op.horizon * FORFEIT_HORIZONS
  while true do
    local found = forfeit_of(queue, queue.first_forfeit)
    if not found or found.ended_at > oldest then break end
    remove_forfeit(queue, queue.first_forfeit)
  end
  if queue.forfeit_count == 0 then queue.opens_to_forfeiters_at = 0 end
end

-- Removes what has ended by now.
local function remove_ended(op)
  local queue = op.queue
  local first = reservation_of(queue, queue.first)
  while first and first.ends_at <= now do
    forfeit(op, queue.first)
    first = reservation_of(queue, queue.first)
  end
end

-- The same for a window, in which calls that came by a reservation count for a window after its end.
local function remove_ended_in_window(op)
  local queue = op.queue
  local mark = queue.marks[1]
  while true do
    local reservation = reservation_of(queue, mark.number)
    if not reservation or reservation.ends_at > now then break end
    if reservation.caller == NO_CALLER then
      mark.number, mark.sum, queue.changed = reservation.after, mark.sum + reservation.cost, true
    else
      forfeit(op, mark.number)
    end
  end
  while queue.first ~= mark.number do
    if reservation_of(queue, queue.first).ends_at + op.window > now then break end
    remove_reservation(op, queue.first)
  end
end

-- Returns the cost that calls without a reservation leave free in a window: of all reservations, but not above the part,
-- unless more of them may be used within one window because they were given by other rules.
local function cost_in_window(op)
  local queue = op.queue
  if op.is_kept == 0 then return 0 end
  if queue.total <= op.part then return queue.total end
  -- While all were given by these rules, no more than the part may be used within one window.
  if now >= queue.mixed_until then return op.part end
  local following, together, most = reservation_of(queue, queue.first), 0, op.part
  local first = following
  while first do
    while following and following.at < first.ends_at + op.window do
      together, following = together + following.cost, reservation_of(queue, following.after)
    end
    most = max(most, together)
    together, first = together - first.cost, reservation_of(queue, first.after)
  end
  return min(most, queue.total)
end

-- Notes until when there are reservations that were given by other rules.
local function note_rules(op)
  local queue = op.queue
  if queue.part == op.part and queue.window == op.window then return end
  local last = reservation_of(queue, queue.last)
  if last then queue.mixed_until = max(queue.mixed_until, last.ends_at + max(op.window, queue.window)) end
  queue.part, queue.window, queue.changed = op.part, op.window, true
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
  local charged = seek(queue, queue.marks[1], function(reservation) return reservation.at <= queue.charged_until end)
  while true do
    local following = reservation_of(queue, charged.number)
    local next_at = following and following.at <= now and following.at
    local first = reservation_of(queue, queue.first)
    if first and first.ends_at <= (next_at or now) then
      hold(op, state, charged.sum, first.ends_at)
      local time, rest = time_of_cost(op, first.cost)
      state.tat, state.tat_rest = state.tat - time, state.tat_rest - rest
      if state.tat_rest < 0 then state.tat, state.tat_rest = state.tat - 1, state.tat_rest + 1024 end
      if state.tat < first.ends_at then state.tat, state.tat_rest = first.ends_at, 0 end
      state.changed = true
      forfeit(op, queue.first)
    elseif next_at then
      hold(op, state, charged.sum, next_at)
      local time, rest = time_of_cost(op, following.cost)
      if state.tat < next_at then state.tat, state.tat_rest = next_at, 0 end
      state.tat, state.tat_rest = add(state.tat, state.tat_rest, time, rest)
      charged.number, charged.sum = following.after, charged.sum + following.cost
      queue.charged_until, queue.changed, state.changed = next_at, true, true
    else
      break
    end
  end
  hold(op, state, charged.sum, now)
end

-- Evaluates a call without a reservation. Sets `op.free_at` if it has no room.
local evaluate_unreserved = {}

evaluate_unreserved[RATE] = function(op, state)
  if op.is_kept == 1 then
    advance_rate(op, state)
  else
    remove_ended(op)
  end
  local queue = op.queue
  local fits = evaluate[RATE](op, state)
  op.held, op.reserved_until = 0, 0
  if op.is_kept == 0 or op.cost == 0 or queue.count == 0 then return fits end
  local upcoming = seek(queue, copy_mark(queue.marks[1]), function(reservation) return reservation.at <= now end)
  local first = reservation_of(queue, upcoming.number)
  if not first then return fits end
  if fits then
    local tat, rest = current_tat(state)
    tat, rest = add(tat, rest, op.cost_time, op.cost_rest)
    if tat < first.at then tat, rest = first.at, 0 end
    tat, rest = add(tat, rest, time_of_cost(op, first.cost))
    if not is_later(tat, rest, first.at + op.refill, op.refill_rest) then return true end
  end
  local last_at = reservation_of(queue, queue.last).at
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
  remove_ended_in_window(op)
  note_rules(op)
  local last = reservation_of(queue, queue.last)
  op.reserved_until = last and last.ends_at + op.window or 0
  return evaluate_with_held(op, state, cost_in_window(op), op.reserved_until)
end

evaluate_unreserved[QUOTA] = function(op, state)
  local queue = op.queue
  remove_ended(op)
  op.reserved_until = 0
  -- None has ended before the period.
  local used = seek(queue, queue.marks[1], function(reservation) return reservation.at < op.period_end end)
  return evaluate_with_held(op, state, op.is_kept * used.sum, op.period_end)
end

-- Returns true if the call has room, by its reservation or without one. `op.found` tells both, the time of the room, the
-- caller's reservation, what is kept for others, and until when.
evaluate_reserved = function(op, state)
  local queue = op.queue
  refresh_queue(op)
  local fits = evaluate_unreserved[op.kind](op, state)
  local free_at, reserved_at, is_admitted = fits and now or op.free_at, 0, fits
  local number = number_of(queue, op.caller)
  if number then
    local reservation = reservation_of(queue, number)
    local at = reservation.at
    if op.is_kept == 1 and op.presented < NEVER and at <= now and op.cost > 0 and op.cost <= reservation.cost then
      op.own, free_at, reserved_at, is_admitted = number, now, at, true
    elseif at > now then
      op.upcoming = number
      if not fits then
        free_at, reserved_at = at, op.is_kept * at
      end
    end
  end
  op.found =
    pack('<dddddd', fits and 1 or 0, is_admitted and 1 or 0, free_at, reserved_at, op.held, op.reserved_until)
  return is_admitted
end

charge_reserved = function(op, state)
  local queue = op.queue
  end_forfeits(op)
  if not op.own then
    local upcoming = op.upcoming and reservation_of(queue, op.upcoming)
    -- A cheaper call isn't the one that was refused.
    if upcoming and op.cost >= upcoming.cost and upcoming.is_excused == 0 then
      upcoming.is_excused = 1
      edit_reservation(queue, op.upcoming, upcoming)
    end
    charge[op.kind](op, state)
    state.changed = true
  elseif op.kind == WINDOW then
    local used = reservation_of(queue, op.own)
    edit_number(queue, used.caller, false)
    used.caller = NO_CALLER
    edit_reservation(queue, op.own, used)
  else
    remove_reservation(op, op.own)
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

-- Passes the reservations that a burst can't hold together with the next one.
local function passed_before(op)
  local queue = op.queue
  local passed = copy_mark(queue.marks[2])
  passed.time, passed.rest = queue.passed_until, queue.passed_rest
  while queue.total - passed.sum + op.cost > op.burst_part do
    local reservation = reservation_of(queue, passed.number)
    if passed.time < reservation.ends_at then passed.time, passed.rest = reservation.ends_at, 0 end
    passed.time, passed.rest = add(passed.time, passed.rest, time_of_cost(op, reservation.cost))
    passed.number, passed.sum = reservation.after, passed.sum + reservation.cost
  end
  return passed
end

local next_instant = {}

next_instant[RATE] = function(op, state)
  local queue = op.queue
  if op.is_kept == 1 and op.cost > op.burst_part then return nil end
  local at = time_of_room(op, state, op.cost)
  if queue.last_at > 0 then at = max(at, queue.last_at + op.part) end
  if op.is_kept == 1 then
    local passed = passed_before(op)
    local time, rest = time_of_cost(op, op.burst_part - (queue.total - passed.sum) - op.cost)
    at, op.passed = max(at, passed.time - time + (passed.rest > rest and 1 or 0)), passed
  end
  return at
end

next_instant[WINDOW] = function(op, state)
  local queue = op.queue
  local reserved = queue.total + op.cost
  if op.is_kept == 0 then
    local ahead, limit = reserved - 1, max(op.limit, 1)
    return time_of_room(op, state, ahead % limit + 1) + op.window * floor(ahead / limit)
  end
  if op.cost > op.part then return nil end
  local mark = seek(queue, queue.marks[2], function(_, sum) return reserved - sum > op.part end)
  local last = mark.sum > 0 and last_before(queue, mark)
  local together = min(reserved, max(op.part, cost_in_window(op)))
  return max(time_of_room(op, state, together), last and last.ends_at + op.window or now)
end

next_instant[QUOTA] = function(op)
  local queue = op.queue
  local before_next = seek(queue, { number = 0, sum = queue.total }, function(reservation)
    return reservation.at < op.next_period_end
  end)
  local ended = seek(queue, queue.marks[2], function(reservation) return reservation.ends_at <= op.period_end end)
  local reserved = before_next.sum - ended.sum
  if queue.last_at > op.period_end or op.is_kept == 1 and reserved + op.cost > op.part then return nil end
  return op.period_end
end

-- Gives the refused caller the next free instant. Returns it, or 0.
reserve = function(op, state)
  local queue = op.queue
  if op.caller == NO_CALLER or op.cost == 0 or op.exceeds_capacity == 1 or number_of(queue, op.caller) then return 0 end
  local standing = standing_of(op)
  if standing == BEHIND and now < queue.opens_to_forfeiters_at then return 0 end
  local at = next_instant[op.kind](op, state)
  if not at then return 0 end
  at = max(at, queue.last_at)
  if at <= now or at - now > op.horizon or not make_record_room(queue) then return 0 end
  if op.passed then
    queue.marks[2] = { number = op.passed.number, sum = op.passed.sum }
    queue.passed_until, queue.passed_rest = op.passed.time, op.passed.rest
  end
  local ends_at = at + op.is_kept * op.grace
  local last = reservation_of(queue, queue.last)
  if last then ends_at = max(ends_at, last.ends_at) end
  add_reservation(queue, at, op.caller, op.cost, ends_at)
  note_standing(op, standing, ends_at)
  return at
end

-- Returns the value of an edited field, or nil if it is removed.
local function value_of(queue, field)
  if #field == 8 then
    local found = queue.reservations[unpack('<d', field)]
    return found
      and pack(RESERVATION_FORMAT, found.at, found.caller, found.cost, found.ends_at, found.is_excused, found.before, found.after)
  end
  local caller = string.sub(field, 2)
  if string.sub(field, 1, 1) == 'c' then
    local number = queue.numbers[caller]
    return number and pack('<d', number)
  end
  local found = queue.forfeits[caller]
  return found and pack(FORFEIT_FORMAT, found.ended_at, found.cost, found.was_late, found.before, found.after)
end

save_queue = function(op)
  local queue = op.queue
  if not queue.changed then return end
  local idle_at = queue.last_at
  local last, last_forfeit = reservation_of(queue, queue.last), forfeit_of(queue, queue.last_forfeit)
  if last then
    idle_at = max(idle_at, last.ends_at + op.is_kept * op.horizon * FORFEIT_HORIZONS)
    if op.kind == WINDOW then idle_at = max(idle_at, last.ends_at + op.window) end
  end
  if last_forfeit then idle_at = max(idle_at, last_forfeit.ended_at + op.horizon * FORFEIT_HORIZONS) end
  if queue.last_at > 0 and op.kind == RATE then idle_at = max(idle_at, queue.last_at + op.longest_spacing) end
  if queue.is_foreign or queue.exists and idle_at <= now then call('DEL', queue.key) end
  if idle_at <= now then return end
  local expires = extend_expiry(queue, min(idle_at, NEVER))
  local first, second = queue.marks[1], queue.marks[2]
  local header = pack(HEADER_FORMAT, queue.kept_until, queue.last_at, queue.charged_until, queue.opens_to_forfeiters_at,
    queue.next_number, queue.first, queue.last, queue.count, queue.total, queue.forfeit_count, first.number, first.sum,
    second.number, second.sum, queue.passed_until, queue.passed_rest, queue.part, queue.window, queue.mixed_until,
    queue.first_forfeit, queue.last_forfeit)
  local fields, values, count = { 'q' }, { header }, 1
  for field in pairs(queue.edits) do
    local value = value_of(queue, field)
    if value then
      count = count + 1
      fields[count], values[count] = field, value
    else
      call('HDEL', queue.key, field)
    end
  end
  -- Four in one call, because calls are the larger part of the cost. The last field fills up the rest.
  for index = 1, count, 4 do
    local second, third, fourth = min(index + 1, count), min(index + 2, count), min(index + 3, count)
    call('HSET', queue.key, fields[index], values[index], fields[second], values[second], fields[third], values[third],
      fields[fourth], values[fourth])
  end
  if expires then call('PEXPIRE', queue.key, expires) end
end
