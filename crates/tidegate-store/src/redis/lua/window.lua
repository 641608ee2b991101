-- core/window.rs. The value is the log, slot by slot, oldest first: `at` and `count`, 16 bytes; and behind it the header, so
-- that a new slot and what changes with it are one piece to write. The slots that count are those from `head` to before
-- `tail`: one that has expired is left behind by moving `head`, and what is left behind goes when it is more than what
-- counts. Before the header there is room for `room` slots, more than to `tail` where some were taken out. So a log of
-- thousands of slots is neither read nor written as a whole.
--
-- `bytes` are the slots from the place `from` on as they are to be; of those, the ones from `edited` on differ from what
-- is stored.

local HEADER_BYTES, SLOT_BYTES, CHUNK_SLOTS = 74, 16, 64

load[WINDOW] = function(state)
  local raw = call('GETRANGE', state.key, -HEADER_BYTES, -1)
  state.edited, state.bytes = math.huge, ''
  if raw == '' then
    state.total, state.newest, state.oldest, state.coarse = 0, 0, 0, 0
    state.head, state.tail, state.from, state.room = 0, 0, 0, 0
    return
  end
  state.exists = true
  local count
  state.kept, state.total, state.newest, state.oldest, state.head, count, state.room, state.coarse, state.ends, state.parole, state.strikes =
    unpack('<dddddddBddB', raw)
  state.tail = state.head + count
  state.from = state.tail
end

local function read_stored_slots(state, place, stop)
  return call('GETRANGE', state.key, place * SLOT_BYTES, stop * SLOT_BYTES - 1)
end

local function read_slot(state, place)
  if place >= state.from then return unpack('<dd', state.bytes, (place - state.from) * SLOT_BYTES + 1) end
  local ahead = state.chunk and place - state.chunk_from or -1
  if ahead < 0 or ahead * SLOT_BYTES >= #state.chunk then
    state.chunk, state.chunk_from = read_stored_slots(state, place, min(place + CHUNK_SLOTS, state.from)), place
    ahead = 0
  end
  return unpack('<dd', state.chunk, ahead * SLOT_BYTES + 1)
end

local function remove_oldest(state, count)
  state.total = state.total - count
  state.head = state.head + 1
  if state.head < state.tail then state.oldest = (read_slot(state, state.head)) end
  state.changed = true
end

-- Fetches slots from the newest back, until `place` is at hand.
local function load_from(state, place)
  if place >= state.from then return end
  local start = max(state.head, min(place, state.from - max(CHUNK_SLOTS, state.tail - state.from)))
  state.bytes = read_stored_slots(state, start, state.from) .. state.bytes
  state.from, state.chunk = start, nil
end

-- Puts `new` where `drop` slots from `place` on were.
local function splice(state, place, drop, new)
  load_from(state, place)
  local before = (place - state.from) * SLOT_BYTES
  state.bytes = string.sub(state.bytes, 1, before) .. new .. string.sub(state.bytes, before + drop * SLOT_BYTES + 1)
  state.tail = state.tail - drop + #new / SLOT_BYTES
  state.edited = min(state.edited, place)
end

local function update_oldest_and_newest(state)
  if state.tail > state.head then
    state.oldest = (read_slot(state, state.head))
    state.newest = (read_slot(state, state.tail - 1))
  end
end

-- Brings slots of the future to `limit`.
local function clamp_future_slots(state, limit)
  load_from(state, state.head)
  local first = state.tail
  while first > state.head and read_slot(state, first - 1) > limit do
    first = first - 1
  end
  local pulled = {}
  for place = first, state.tail - 1 do
    local _, count = read_slot(state, place)
    pulled[#pulled + 1] = pack('<dd', limit, count)
  end
  splice(state, first, #pulled, table.concat(pulled))
  state.changed = true
  update_oldest_and_newest(state)
end

-- Forgets what no longer counts, and returns the moment to judge at.
local function refresh_log(op, state)
  local judged_at = now
  if state.tail > state.head and state.newest > now + op.lead then
    local log_time = max(state.newest - op.lead, 0)
    if log_time - now <= MAX_CLOCK_LAG then
      judged_at = log_time
    else
      clamp_future_slots(state, now + op.lead)
    end
  end
  if state.tail > state.head and judged_at - state.newest >= op.window then
    state.head, state.total, state.changed = state.tail, 0, true
  end
  while state.tail > state.head and judged_at - state.oldest >= op.window do
    local _, count = read_slot(state, state.head)
    remove_oldest(state, count)
  end
  if state.coarse == 1 and state.total <= op.entries then state.coarse = 0 end
  return judged_at
end

local function decode_op(op)
  op.limit, op.window, op.entries, op.max_slots, op.cell_length, op.lead, op.batch_lead = unpack('<ddddddd', bytes, op.place)
end

evaluate[WINDOW] = function(op, state)
  decode_op(op)
  refresh_log(op, state)
  op.free_from, op.free_count = 0, 0
  if op.never == 1 then
    op.free_at = NEVER
    return false
  end
  if op.cost <= max(op.limit - state.total, 0) then return true end
  local missing = state.total + op.cost - op.limit
  op.free_at = now
  for place = state.head, state.tail - 1 do
    local at, count = read_slot(state, place)
    op.free_from, op.free_count = at, op.free_count + count
    op.free_at = at + op.window
    if op.free_count >= missing then break end
  end
  return false
end

has_room_for_parole[WINDOW] = function(op, state)
  return state.parole <= max(op.limit - state.total, 0)
end

local function cell_of(op, at)
  return floor(at / op.cell_length)
end

local function merge_oldest(state)
  if state.tail - state.head < 2 then return end
  local _, count = read_slot(state, state.head)
  local total = state.total
  remove_oldest(state, count)
  state.total = total
  local at, next_count = read_slot(state, state.head)
  splice(state, state.head, 1, pack('<dd', at, next_count + count))
end

-- Merges slots that lie in the same cell of the grid.
local function merge_cells(op, state)
  load_from(state, state.head)
  local merged, size = {}, 0
  local at, count = read_slot(state, state.head)
  for place = state.head + 1, state.tail - 1 do
    local next_at, next_count = read_slot(state, place)
    if cell_of(op, at) == cell_of(op, next_at) then
      next_count = next_count + count
    else
      size = size + 1
      merged[size] = pack('<dd', at, count)
    end
    at, count = next_at, next_count
  end
  merged[size + 1] = pack('<dd', at, count)
  splice(state, state.head, state.tail - state.head, table.concat(merged))
  state.coarse = 1
  update_oldest_and_newest(state)
end

local function make_room(op, state)
  while state.tail - state.head >= op.max_slots do
    merge_oldest(state)
  end
end

charge[WINDOW] = function(op, state)
  if op.cost == 0 then return end
  local at = min(now + op.batch_lead, NEVER)
  local last = state.tail - 1
  if last >= state.head then
    at = max(at, state.newest)
    if state.newest == at or (state.coarse == 1 and cell_of(op, state.newest) == cell_of(op, at)) then
      load_from(state, last)
      local _, count = read_slot(state, last)
      splice(state, last, 1, pack('<dd', at, count + op.cost))
      state.total = min(state.total + op.cost, MAX_EXACT_INTEGER)
      update_oldest_and_newest(state)
      return
    end
    if last - state.head + 1 >= op.max_slots then
      if op.cell_length == 0 then
        make_room(op, state)
      else
        merge_cells(op, state)
      end
    end
  end
  if state.tail == state.head then state.oldest = at end
  splice(state, state.tail, 0, pack('<dd', at, op.cost))
  state.newest, state.total = at, min(state.total + op.cost, MAX_EXACT_INTEGER)
end

save[WINDOW] = function(op, state)
  local size = state.tail - state.head
  local usage = size > 0 and min(state.newest + op.window, NEVER) or 0
  local idle_at = max(usage, record_retained_until(op, state))
  -- More has been left behind than counts: time to write it anew.
  if state.head > size + CHUNK_SLOTS then load_from(state, state.head) end
  local whole = state.from <= state.head or idle_at <= now
  if whole then
    state.bytes = string.sub(state.bytes, (state.head - state.from) * SLOT_BYTES + 1)
    state.head, state.tail, state.from, state.room = 0, size, 0, size
  else
    state.room = max(state.room, state.tail)
  end
  local header = pack(
    '<ddddddBddB',
    state.total,
    state.newest,
    state.oldest,
    state.head,
    size,
    state.room,
    state.coarse,
    state.ends,
    state.parole,
    state.strikes
  )
  if whole then
    write_or_delete(state, idle_at, header, state.bytes)
  else
    local expires = extend_expiry(state, idle_at)
    local place = min(state.edited, state.tail)
    local changed = string.sub(state.bytes, (place - state.from) * SLOT_BYTES + 1)
    local unused = string.rep('\0', (state.room - state.tail) * SLOT_BYTES)
    call('SETRANGE', state.key, place * SLOT_BYTES, changed .. unused .. pack('<d', state.kept) .. header)
    if expires then call('PEXPIRE', state.key, expires) end
  end
  state.edited = math.huge
end

-- What is used, the newest slot, and when how much of it is free.
encode_state[WINDOW] = function(state, op)
  local newest = state.tail > state.head and state.newest or 0
  return pack('<dddd', state.total, newest, op.free_from, op.free_count)
end
