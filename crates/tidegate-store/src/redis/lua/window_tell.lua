-- The last slot that isn't later than `at`.
local function find(state, at)
  while state.from > state.head and (state.from == state.tail or slot(state, state.from) > at) do
    reach(state, state.from - 1)
  end
  local low, high = max(state.from, state.head) - 1, state.tail - 1
  while low < high do
    local middle = ceil((low + high) / 2)
    if slot(state, middle) <= at then
      low = middle
    else
      high = middle - 1
    end
  end
  return low >= state.head and low or nil
end

-- Takes `cost` from the slot made at this moment; false if there is none, or it holds less.
local function take_at(state, at, cost)
  local place = find(state, at)
  if not place then return false end
  local found, count = slot(state, place)
  if found ~= at or count < cost then return false end
  splice(state, place, 1, count > cost and pack('<dd', at, count - cost) or '')
  state.total = state.total - cost
  note_ends(state)
  return true
end

-- Puts a slot where its moment belongs: behind those that are as old.
local function put_at(state, at, cost)
  local place = find(state, at)
  state.total = min(state.total + cost, COUNTED)
  if place then
    local found, count = slot(state, place)
    if found == at then
      splice(state, place, 1, pack('<dd', at, count + cost))
      return
    end
  end
  splice(state, place and place + 1 or state.head, 0, pack('<dd', at, cost))
  note_ends(state)
end

local function refund(op, state)
  if counted_at > 0 then
    if now - counted_at >= op.length then return end
    if op.cell == 0 and take_at(state, counted_at, op.cost) then return end
  end
  local rest = op.cost
  while rest > 0 and state.tail > state.head do
    local at, count = slot(state, state.head)
    if count > rest then
      splice(state, state.head, 1, pack('<dd', at, count - rest))
      state.total = state.total - rest
      return
    end
    rest = rest - count
    pop(state, count)
  end
end

tell[WINDOW] = function(op, state)
  if op.verb ~= REFUND and op.verb ~= SETTLE then return false end
  arguments(op)
  settle_log(op, state)
  if op.verb == REFUND then
    refund(op, state)
  elseif op.cost > 0 and counted_at > now and op.cell == 0 and take_at(state, counted_at, op.cost) then
    make_room(op, state)
    put_at(state, now, op.cost)
  end
  return true
end
