-- core/window. The value is the log's slots, oldest first, 16 bytes each (`at` and `count`), and then the header, so
-- that a new slot and the header are written together. The live slots are those from `head` to before `tail`. An
-- expired slot is skipped by moving `head`. Skipped slots are removed once they outnumber the live ones. There is space
-- for `allocated` slots before the header: more than up to `tail` if some were removed. So a log of thousands of slots
-- is neither read nor written as a whole.
--
-- `loaded` holds the slots from `loaded_from` on as they shall be. Of these, the slots from `edited_from` on differ
-- from the stored ones.

local HEADER_BYTES, SLOT_BYTES, CHUNK_SLOTS = 74, 16, 64

load[WINDOW] = function(state)
  local value = call('GETRANGE', state.key, -HEADER_BYTES, -1)
  state.edited_from, state.loaded = math.huge, ''
  if value == '' then
    state.total, state.newest, state.oldest, state.merged = 0, 0, 0, 0
    state.head, state.tail, state.loaded_from, state.allocated = 0, 0, 0, 0
    return
  end
  state.exists = true
  local count
  state.kept_until, state.total, state.newest, state.oldest, state.head, count, state.allocated, state.merged,
    state.blocked_until, state.parole, state.strikes =
    unpack('<dddddddBddB', value)
  state.tail = state.head + count
  state.loaded_from = state.tail
end

local function read_stored_slots(state, index, stop)
  return call('GETRANGE', state.key, index * SLOT_BYTES, stop * SLOT_BYTES - 1)
end

local function read_slot(state, index)
  if index >= state.loaded_from then return unpack('<dd', state.loaded, (index - state.loaded_from) * SLOT_BYTES + 1) end
  local offset = state.chunk and index - state.chunk_from or -1
  if offset < 0 or offset * SLOT_BYTES >= #state.chunk then
    state.chunk, state.chunk_from = read_stored_slots(state, index, min(index + CHUNK_SLOTS, state.loaded_from)), index
    offset = 0
  end
  return unpack('<dd', state.chunk, offset * SLOT_BYTES + 1)
end

local function remove_oldest(state, count)
  state.total = state.total - count
  state.head = state.head + 1
  if state.head < state.tail then state.oldest = (read_slot(state, state.head)) end
  state.changed = true
end

-- Loads slots, from the newest back to `index`.
local function load_from(state, index)
  if index >= state.loaded_from then return end
  local start = max(state.head, min(index, state.loaded_from - max(CHUNK_SLOTS, state.tail - state.loaded_from)))
  state.loaded = read_stored_slots(state, start, state.loaded_from) .. state.loaded
  state.loaded_from, state.chunk = start, nil
end

-- Replaces `removed` slots from `index` on by the encoded slots `inserted`.
local function splice(state, index, removed, inserted)
  load_from(state, index)
  local before = (index - state.loaded_from) * SLOT_BYTES
  state.loaded = string.sub(state.loaded, 1, before) .. inserted .. string.sub(state.loaded, before + removed * SLOT_BYTES + 1)
  state.tail = state.tail - removed + #inserted / SLOT_BYTES
  state.edited_from = min(state.edited_from, index)
end

local function update_oldest_and_newest(state)
  if state.tail > state.head then
    state.oldest = (read_slot(state, state.head))
    state.newest = (read_slot(state, state.tail - 1))
  end
end

-- Moves slots that are later than `limit` to it.
local function clamp_future_slots(state, limit)
  load_from(state, state.head)
  local first = state.tail
  while first > state.head and read_slot(state, first - 1) > limit do
    first = first - 1
  end
  local clamped = {}
  for index = first, state.tail - 1 do
    local _, count = read_slot(state, index)
    clamped[#clamped + 1] = pack('<dd', limit, count)
  end
  splice(state, first, #clamped, table.concat(clamped))
  state.changed = true
  update_oldest_and_newest(state)
end

-- Removes the slots that no longer count. After a step of the clock back, the log's own time counts.
local function refresh_log(op, state)
  local log_time = now
  if state.tail > state.head and state.newest > now + op.lead then
    local newest_time = max(state.newest - op.lead, 0)
    if newest_time - now <= MAX_CLOCK_LAG then
      log_time = newest_time
    else
      clamp_future_slots(state, now + op.lead)
    end
  end
  if state.tail > state.head and log_time - state.newest >= op.window then
    state.head, state.total, state.changed = state.tail, 0, true
  end
  while state.tail > state.head and log_time - state.oldest >= op.window do
    local _, count = read_slot(state, state.head)
    remove_oldest(state, count)
  end
  if state.merged == 1 and state.total <= op.entries then state.merged = 0 end
end

local function decode_op(op)
  op.limit, op.window, op.entries, op.max_slots, op.cell_length, op.lead, op.batch_lead = unpack('<ddddddd', bytes, op.position)
end

evaluate[WINDOW] = function(op, state)
  decode_op(op)
  refresh_log(op, state)
  op.free_from, op.free_count = 0, 0
  if op.exceeds_capacity == 1 then
    op.free_at = NEVER
    return false
  end
  if op.cost <= max(op.limit - state.total, 0) then return true end
  local missing = state.total + op.cost - op.limit
  op.free_at = now
  for index = state.head, state.tail - 1 do
    local at, count = read_slot(state, index)
    op.free_from, op.free_count = at, op.free_count + count
    op.free_at = at + op.window
    if op.free_count >= missing then break end
  end
  return false
end

has_room_for_parole[WINDOW] = function(op, state)
  return state.parole <= max(op.limit - state.total, 0)
end

local function cell_index(op, at)
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

-- Merges slots of the same grid cell.
local function merge_cells(op, state)
  load_from(state, state.head)
  local merged, size = {}, 0
  local at, count = read_slot(state, state.head)
  for index = state.head + 1, state.tail - 1 do
    local next_at, next_count = read_slot(state, index)
    if cell_index(op, at) == cell_index(op, next_at) then
      next_count = next_count + count
    else
      size = size + 1
      merged[size] = pack('<dd', at, count)
    end
    at, count = next_at, next_count
  end
  merged[size + 1] = pack('<dd', at, count)
  splice(state, state.head, state.tail - state.head, table.concat(merged))
  state.merged = 1
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
    if state.newest == at or (state.merged == 1 and cell_index(op, state.newest) == cell_index(op, at)) then
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
  local usage_idle_at = size > 0 and min(state.newest + op.window, NEVER) or 0
  local idle_at = max(usage_idle_at, record_retained_until(op, state))
  -- More slots were skipped than are live, so all are written again.
  if state.head > size + CHUNK_SLOTS then load_from(state, state.head) end
  local is_whole = state.loaded_from <= state.head or idle_at <= now
  if is_whole then
    state.loaded = string.sub(state.loaded, (state.head - state.loaded_from) * SLOT_BYTES + 1)
    state.head, state.tail, state.loaded_from, state.allocated = 0, size, 0, size
  else
    state.allocated = max(state.allocated, state.tail)
  end
  local header = pack('<ddddddBddB', state.total, state.newest, state.oldest, state.head, size, state.allocated,
    state.merged, state.blocked_until, state.parole, state.strikes)
  if is_whole then
    write_or_delete(state, idle_at, header, state.loaded)
  else
    local expires = extend_expiry(state, idle_at)
    local index = min(state.edited_from, state.tail)
    local changed = string.sub(state.loaded, (index - state.loaded_from) * SLOT_BYTES + 1)
    local unused = string.rep('\0', (state.allocated - state.tail) * SLOT_BYTES)
    call('SETRANGE', state.key, index * SLOT_BYTES, changed .. unused .. pack('<d', state.kept_until) .. header)
    if expires then call('PEXPIRE', state.key, expires) end
  end
  state.edited_from = math.huge
end

-- The total, the newest slot, and which slots must expire until there is room.
encode_state[WINDOW] = function(state, op)
  local newest = state.tail > state.head and state.newest or 0
  return pack('<dddd', state.total, newest, op.free_from, op.free_count)
end
