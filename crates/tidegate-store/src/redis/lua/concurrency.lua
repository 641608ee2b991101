-- core/concurrency.rs. The permits are one string. Each has 24 bytes: its holder, its count and the end of its lease.
-- They are in the order of these ends, so expired ones come first, and a holder is found without decoding each.

local PERMIT_BYTES = 24

load[CONCURRENCY] = function(state)
  local value = call('GET', state.key)
  state.exists = value and true
  state.kept_until, state.used, state.blocked_until, state.parole, state.strikes =
    unpack('<ddddB', value or string.rep('\0', 33))
  state.permits = string.sub(value or '', 34)
end

local function read_permit(state, position)
  return unpack('<c8dd', state.permits, position)
end

-- Returns the end of the last lease; 0 if there is none.
local function last_lease_end(state)
  if state.permits == '' then return 0 end
  return (unpack('<d', state.permits, #state.permits - 7))
end

-- Returns the position of the holder's permit, or nil.
local function find_permit(state)
  local from = 1
  while true do
    local position = string.find(state.permits, holder, from, true)
    if not position then return nil end
    if (position - 1) % PERMIT_BYTES == 0 then return position end
    from = position + 1
  end
end

local function remove_permit(state, position)
  state.permits = string.sub(state.permits, 1, position - 1) .. string.sub(state.permits, position + PERMIT_BYTES)
end

-- Inserts a permit of the holder in the order of the leases.
local function insert_permit(state, count, expires)
  local position = #state.permits + 1
  while position > 1 do
    local _, _, other_expires = read_permit(state, position - PERMIT_BYTES)
    if other_expires <= expires then break end
    position = position - PERMIT_BYTES
  end
  state.permits = string.sub(state.permits, 1, position - 1)
    .. pack('<c8dd', holder, count, expires)
    .. string.sub(state.permits, position)
end

local function refresh_permits(op, state)
  local latest = min(now + op.lease, NEVER)
  if last_lease_end(state) > latest + MAX_CLOCK_LAG then
    local corrected = {}
    for position = 1, #state.permits, PERMIT_BYTES do
      local permit_holder, count, expires = read_permit(state, position)
      if expires > latest + MAX_CLOCK_LAG then expires = latest end
      corrected[#corrected + 1] = pack('<c8dd', permit_holder, count, expires)
    end
    -- The shortened ones may now expire before others.
    table.sort(corrected, function(a, b) return unpack('<d', a, 17) < unpack('<d', b, 17) end)
    state.permits = table.concat(corrected)
    state.changed = true
  end
  local position, size = 1, #state.permits
  while position < size do
    local _, count, expires = read_permit(state, position)
    if expires > now then break end
    state.used = state.used - count
    position = position + PERMIT_BYTES
  end
  if position > 1 then
    state.permits = string.sub(state.permits, position)
    state.changed = true
  end
end

evaluate[CONCURRENCY] = function(op, state)
  op.limit, op.lease = unpack('<dd', bytes, op.position)
  refresh_permits(op, state)
  op.own_position = find_permit(state)
  op.free_count = 0
  if op.cost > MAX_COST then
    op.free_at = min(now + op.cost - MAX_COST, NEVER)
  elseif op.exceeds_capacity == 1 then
    op.free_at = NEVER
  elseif state.used + op.cost <= op.limit then
    return true
  else
    local missing = state.used + op.cost - op.limit
    op.free_at = now
    for position = 1, #state.permits, PERMIT_BYTES do
      local _, count, expires = read_permit(state, position)
      op.free_at = expires
      op.free_count = op.free_count + count
      if op.free_count >= missing then break end
    end
  end
  return op.own_position ~= nil
end

has_room_for_parole[CONCURRENCY] = function(op, state)
  return state.parole <= max(op.limit - state.used, 0)
end

charge[CONCURRENCY] = function(op, state)
  local expires = min(now + op.lease, NEVER)
  local own_position = find_permit(state)
  if own_position then
    local _, count = read_permit(state, own_position)
    remove_permit(state, own_position)
    insert_permit(state, count, expires)
  elseif op.cost > 0 then
    insert_permit(state, op.cost, expires)
    state.used = state.used + op.cost
  end
end

save[CONCURRENCY] = function(op, state)
  local value = pack('<dddB', state.used, state.blocked_until, state.parole, state.strikes) .. state.permits
  write_or_delete(state, max(last_lease_end(state), record_retained_until(op, state)), value)
end

-- The number in use, the holder's own permit, the end of the last lease of others, and when how much is free.
encode_state[CONCURRENCY] = function(state, op)
  local count, expires, last = 0, 0, last_lease_end(state)
  if op.own_position then
    local _
    _, count, expires = read_permit(state, op.own_position)
    local is_last = op.own_position + PERMIT_BYTES > #state.permits
    local other_position = is_last and op.own_position - PERMIT_BYTES or #state.permits - PERMIT_BYTES + 1
    last = 0
    if other_position > 0 then
      _, _, last = read_permit(state, other_position)
    end
  end
  return pack('<dddddd', state.used, count, expires, last, op.free_at or 0, op.free_count)
end
