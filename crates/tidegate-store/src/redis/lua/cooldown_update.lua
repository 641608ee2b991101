local MAX_GENERATION = 4294967295

local function close(state, opens_at)
  if opens_at > max(state.opens_at, now) then state.opens_at, state.last_event_at = opens_at, now end
end

-- The wait after this many closings in a row.
local function closing_wait(op, closings)
  local wait = op.base_wait
  for _ = 2, closings do
    if wait >= op.cap_wait then break end
    wait = wait * 2
  end
  return min(wait, op.cap_wait)
end

apply[COOLDOWN] = function(op, state)
  if op.verb ~= THROTTLE and op.verb ~= SUCCESS and op.verb ~= DISABLE and op.verb ~= DEBIT then return false end
  refresh_gate(op, state)
  if op.verb == SUCCESS then
    if op.generation == state.generation then state.closings_in_row = 0 end
  elseif op.verb == THROTTLE then
    local wait = op.cost
    if op.generation >= state.generation then
      state.generation = min(op.generation + 1, MAX_GENERATION)
      state.closings_in_row = min(state.closings_in_row + 1, 255)
      if wait == 0 or state.closings_in_row > 1 then wait = max(wait, closing_wait(op, state.closings_in_row)) end
    end
    close(state, min(now + wait, NEVER))
  elseif op.verb == DEBIT then
    close(state, min(now + op.cost, NEVER))
  else
    state.generation = min(state.generation + 1, MAX_GENERATION)
    close(state, op.cost == 0 and NEVER or min(now + op.cost, NEVER))
  end
  return true
end
