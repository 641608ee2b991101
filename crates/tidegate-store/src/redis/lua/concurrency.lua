-- core/concurrency.rs. Permits lie in a string, each 24 bytes: holder, count, and when the lease ends, in that order;
-- so those that have ended are at the front, and a holder is found without looking at each.

local PERMIT = 24

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

local function permit(state, place)
  return unpack('<c8dd', state.permits, place)
end

-- When the last lease ends; 0 if there is none.
local function last_lease(state)
  if state.permits == '' then return 0 end
  return (unpack('<d', state.permits, #state.permits - 7))
end

-- Where the holder's permit is.
local function find(state, name)
  local from = 1
  while true do
    local place = string.find(state.permits, name, from, true)
    if not place then return nil end
    if (place - 1) % PERMIT == 0 then return place end
    from = place + 1
  end
end

local function without(state, place)
  state.permits = string.sub(state.permits, 1, place - 1) .. string.sub(state.permits, place + PERMIT)
end

-- Puts a permit where its lease's end belongs.
local function put(state, name, count, lease_ends)
  local place = #state.permits + 1
  while place > 1 do
    local _, _, other = permit(state, place - PERMIT)
    if other <= lease_ends then break end
    place = place - PERMIT
  end
  state.permits = string.sub(state.permits, 1, place - 1)
    .. pack('<c8dd', name, count, lease_ends)
    .. string.sub(state.permits, place)
end

local function settle_permits(op, state)
  local longest = min(now + op.lease, NEVER)
  if last_lease(state) > longest + OVERTAKEN then
    local mended = {}
    for place = 1, #state.permits, PERMIT do
      local name, count, lease_ends = permit(state, place)
      if lease_ends > longest + OVERTAKEN then lease_ends = longest end
      mended[#mended + 1] = pack('<c8dd', name, count, lease_ends)
    end
    -- Those that were cut short may now end before others that were not.
    table.sort(mended, function(a, b) return unpack('<d', a, 17) < unpack('<d', b, 17) end)
    state.permits = table.concat(mended)
    state.changed = true
  end
  local place, size = 1, #state.permits
  while place < size do
    local _, count, lease_ends = permit(state, place)
    if lease_ends > now then break end
    state.used = state.used - count
    place = place + PERMIT
  end
  if place > 1 then
    state.permits = string.sub(state.permits, place)
    state.changed = true
  end
end

judge[CONCURRENCY] = function(op, state)
  op.limit, op.lease = unpack('<dd', bytes, op.place)
  settle_permits(op, state)
  op.own = find(state, holder)
  op.free_from, op.free_count = 0, 0
  if op.never == 1 then
    op.free_at = NEVER
  elseif state.used + op.cost <= op.limit then
    return true
  else
    local missing = state.used + op.cost - op.limit
    op.free_at = now
    for place = 1, #state.permits, PERMIT do
      local _, count, lease_ends = permit(state, place)
      op.free_at = lease_ends
      op.free_count = op.free_count + count
      if op.free_count >= missing then break end
    end
  end
  return op.own ~= nil
end

covers[CONCURRENCY] = function(op, state)
  return state.parole <= max(op.limit - state.used, 0)
end

charge[CONCURRENCY] = function(op, state)
  local lease_ends = min(now + op.lease, NEVER)
  local own = find(state, holder)
  if own then
    local _, count = permit(state, own)
    without(state, own)
    put(state, holder, count, lease_ends)
  elseif op.cost > 0 then
    put(state, holder, op.cost, lease_ends)
    state.used = state.used + op.cost
  end
end

save[CONCURRENCY] = function(op, state)
  local value = pack('<dddB', state.used, state.ends, state.parole, state.strikes) .. state.permits
  keep(state, max(last_lease(state), remembered(op, state)), value)
end

-- What is used, the holder's own permit, when the last lease ends that isn't the holder's, and when how much is free.
facts[CONCURRENCY] = function(state, op)
  local count, lease_ends, last = 0, 0, last_lease(state)
  if op.own then
    local _
    _, count, lease_ends = permit(state, op.own)
    local other = op.own + PERMIT > #state.permits and op.own - PERMIT or #state.permits - PERMIT + 1
    last = 0
    if other > 0 then
      _, _, last = permit(state, other)
    end
  end
  return pack('<dddddd', state.used, count, lease_ends, last, op.free_at or 0, op.free_count)
end
