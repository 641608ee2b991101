local MAX_GENERATION = 4294967295

local function close(state, open_at)
  if open_at > max(state.opens_at, now) then state.opens_at, state.last_event_at = open_at, now end
end

-- The n-th closing.
local function wait_for_closing(op, step)
  local length = op.base_wait
  for _ = 2, step do
    if length >= op.cap_wait then break end
    length = length * 2
  end
  return min(length, op.cap_wait)
end

apply[COOLDOWN] = function(op, state)
  if op.verb ~= THROTTLE and op.verb ~= SUCCESS and op.verb ~= DISABLE then return false end
  refresh_gate(op, state)
  if op.verb == SUCCESS then
    if op.generation == state.generation then state.closings_in_row = 0 end
  elseif op.verb == THROTTLE then
    local length = op.cost
    if op.generation >= state.generation then
      state.generation = min(op.generation + 1, MAX_GENERATION)
      state.closings_in_row = min(state.closings_in_row + 1, 255)
      length = max(length, wait_for_closing(op, state.closings_in_row))
    end
    close(state, min(now + length, NEVER))
  else
    state.generation = min(state.generation + 1, MAX_GENERATION)
    close(state, op.cost == 0 and NEVER or min(now + op.cost, NEVER))
  end
  return true
end
