-- core/concurrency.rs. Permits lie in a string, each 24 bytes: holder, count, and when the lease ends, in that order;
-- so those that have ended are at the front, and a holder is found without looking at each.

local PERMIT_BYTES = 24

load[CONCURRENCY] = function(state)
  local value = call('GET', state.key)
  if not value then
    state.used, state.permits = 0, ''
    return
  end
  state.exists = true
  state.kept, state.used, state.ends, state.parole, state.strikes = unpack('<ddddB', value)
  state.permits = string.sub(value, 34)
end

local function read_permit(state, place)
  return unpack('<c8dd', state.permits, place)
end

-- When the last lease ends; 0 if there is none.
local function last_lease_end(state)
  if state.permits == '' then return 0 end
  return (unpack('<d', state.permits, #state.permits - 7))
end

-- Where the holder's permit is.
local function find_permit(state, name)
  local from = 1
  while true do
    local place = string.find(state.permits, name, from, true)
    if not place then return nil end
    if (place - 1) % PERMIT_BYTES == 0 then return place end
    from = place + 1
  end
end

local function remove_permit(state, place)
  state.permits = string.sub(state.permits, 1, place - 1) .. string.sub(state.permits, place + PERMIT_BYTES)
end

-- Puts a permit where its lease's end belongs.
local function insert_permit(state, name, count, lease_ends)
  local place = #state.permits + 1
  while place > 1 do
    local _, _, other = read_permit(state, place - PERMIT_BYTES)
    if other <= lease_ends then break end
    place = place - PERMIT_BYTES
  end
  state.permits = string.sub(state.permits, 1, place - 1)
    .. pack('<c8dd', name, count, lease_ends)
    .. string.sub(state.permits, place)
end

local function refresh_permits(op, state)
  local longest = min(now + op.lease, NEVER)
  if last_lease_end(state) > longest + MAX_CLOCK_LAG then
    local corrected = {}
    for place = 1, #state.permits, PERMIT_BYTES do
      local name, count, lease_ends = read_permit(state, place)
      if lease_ends > longest + MAX_CLOCK_LAG then lease_ends = longest end
      corrected[#corrected + 1] = pack('<c8dd', name, count, lease_ends)
    end
    -- Those that were cut short may now end before others that were not.
    table.sort(corrected, function(a, b) return unpack('<d', a, 17) < unpack('<d', b, 17) end)
    state.permits = table.concat(corrected)
    state.changed = true
  end
  local place, size = 1, #state.permits
  while place < size do
    local _, count, lease_ends = read_permit(state, place)
    if lease_ends > now then break end
    state.used = state.used - count
    place = place + PERMIT_BYTES
  end
  if place > 1 then
    state.permits = string.sub(state.permits, place)
    state.changed = true
  end
end

evaluate[CONCURRENCY] = function(op, state)
  op.limit, op.lease = unpack('<dd', bytes, op.place)
  refresh_permits(op, state)
  op.own = find_permit(state, holder)
  op.free_from, op.free_count = 0, 0
  if op.never == 1 then
    op.free_at = NEVER
  elseif state.used + op.cost <= op.limit then
    return true
  else
    local missing = state.used + op.cost - op.limit
    op.free_at = now
    for place = 1, #state.permits, PERMIT_BYTES do
      local _, count, lease_ends = read_permit(state, place)
      op.free_at = lease_ends
      op.free_count = op.free_count + count
      if op.free_count >= missing then break end
    end
  end
  return op.own ~= nil
end

has_room_for_parole[CONCURRENCY] = function(op, state)
  return state.parole <= max(op.limit - state.used, 0)
end

charge[CONCURRENCY] = function(op, state)
  local lease_ends = min(now + op.lease, NEVER)
  local own = find_permit(state, holder)
  if own then
    local _, count = read_permit(state, own)
    remove_permit(state, own)
    insert_permit(state, holder, count, lease_ends)
  elseif op.cost > 0 then
    insert_permit(state, holder, op.cost, lease_ends)
    state.used = state.used + op.cost
  end
end

save[CONCURRENCY] = function(op, state)
  local value = pack('<dddB', state.used, state.ends, state.parole, state.strikes) .. state.permits
  write_or_delete(state, max(last_lease_end(state), record_retained_until(op, state)), value)
end

-- What is used, the holder's own permit, when the last lease ends that isn't the holder's, and when how much is free.
encode_state[CONCURRENCY] = function(state, op)
  local count, lease_ends, last = 0, 0, last_lease_end(state)
  if op.own then
    local _
    _, count, lease_ends = read_permit(state, op.own)
    local other = op.own + PERMIT_BYTES > #state.permits and op.own - PERMIT_BYTES or #state.permits - PERMIT_BYTES + 1
    last = 0
    if other > 0 then
      _, _, last = read_permit(state, other)
    end
  end
  return pack('<dddddd', state.used, count, lease_ends, last, op.free_at or 0, op.free_count)
end
