-- Returns the index of the last slot that isn't later than `at`, or nil.
local function find_last_slot(state, at)
  while state.loaded_from > state.head and (state.loaded_from == state.tail or read_slot(state, state.loaded_from) > at) do
    load_from(state, state.loaded_from - 1)
  end
  local low, high = max(state.loaded_from, state.head) - 1, state.tail - 1
  while low < high do
    local middle = ceil((low + high) / 2)
    if read_slot(state, middle) <= at then
      low = middle
    else
      high = middle - 1
    end
  end
  return low >= state.head and low or nil
end

-- Removes `cost` from the slot at exactly `at`. Returns false if there is none, or it holds less.
local function remove_from_slot(state, at, cost)
  local index = find_last_slot(state, at)
  if not index then return false end
  local found, count = read_slot(state, index)
  if found ~= at or count < cost then return false end
  splice(state, index, 1, count > cost and pack('<dd', at, count - cost) or '')
  state.total = state.total - cost
  update_oldest_and_newest(state)
  return true
end

-- Inserts a slot in the order of time, or adds its cost to the slot at the same time.
local function insert_slot(state, at, cost)
  local index = find_last_slot(state, at)
  state.total = min(state.total + cost, MAX_EXACT_INTEGER)
  if index then
    local found, count = read_slot(state, index)
    if found == at then
      splice(state, index, 1, pack('<dd', at, count + cost))
      return
    end
  end
  splice(state, index and index + 1 or state.head, 0, pack('<dd', at, cost))
  update_oldest_and_newest(state)
end

local function refund(op, state)
  if counted_at > 0 then
    if now - counted_at >= op.window then return end
    if op.cell_length == 0 and remove_from_slot(state, counted_at, op.cost) then return end
  end
  -- A call by a reservation isn't among the slots, and another one must not be forgotten for it.
  if op.has_penalty == RESERVES then return end
  local rest = op.cost
  while rest > 0 and state.tail > state.head do
    local at, count = read_slot(state, state.head)
    if count > rest then
      splice(state, state.head, 1, pack('<dd', at, count - rest))
      state.total = state.total - rest
      return
    end
    rest = rest - count
    remove_oldest(state, count)
  end
end

apply[WINDOW] = function(op, state)
  if op.verb ~= REFUND and op.verb ~= SETTLE then return false end
  decode_op(op)
  refresh_log(op, state)
  if op.verb == REFUND then
    refund(op, state)
  elseif op.cost > 0 and counted_at > now and op.cell_length == 0 and remove_from_slot(state, counted_at, op.cost) then
    make_room(op, state)
    insert_slot(state, now, op.cost)
  end
  return true
end
