local MOST = 4294967295

local function close(state, open_at)
  if open_at > max(state.open_at, now) then state.open_at, state.last = open_at, now end
end

-- The n-th closing.
local function wait(op, step)
  local length = op.base_wait
  for _ = 2, step do
    if length >= op.cap_wait then break end
    length = length * 2
  end
  return min(length, op.cap_wait)
end

tell[COOLDOWN] = function(op, state)
  if op.verb ~= THROTTLE and op.verb ~= SUCCEED and op.verb ~= DISABLE then return false end
  settle_gate(op, state)
  if op.verb == SUCCEED then
    if op.generation == state.generation then state.step = 0 end
  elseif op.verb == THROTTLE then
    local length = op.cost
    if op.generation >= state.generation then
      state.generation = min(op.generation + 1, MOST)
      state.step = min(state.step + 1, 255)
      length = max(length, wait(op, state.step))
    end
    close(state, min(now + length, NEVER))
  else
    state.generation = min(state.generation + 1, MOST)
    close(state, op.cost == 0 and NEVER or min(now + op.cost, NEVER))
  end
  return true
end
