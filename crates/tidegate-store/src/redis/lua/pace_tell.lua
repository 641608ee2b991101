local HALF, WORD = 65536, 4294967296

-- So many thousandths of it, rounded to the nearest: the whole thousands first, as the product of both may have gaps.
local function thousandths(nanos, share)
  local rest = math.fmod(nanos, 1000)
  return (nanos - rest) / 1000 * share + floor((rest * share + 500) / 1000)
end

-- The number from `low` to `high` that 32 random bits stand for: width times draw by 2^32, sixteen bits of the width after
-- the other, so that no product passes 2^53.
local function placed(low, high, draw)
  local width = high - low + 1
  local upper = floor(width / WORD)
  local lower = width - upper * WORD
  local middle = floor(lower / HALF)
  lower = lower - middle * HALF
  return low + draw * upper + floor((draw * middle + floor(draw * lower / HALF)) / HALF)
end

local function jittered(op, value, most)
  local spread = min(thousandths(value, op.randomization), op.max_randomization, most)
  if spread == 0 then return value end
  return placed(max(value - spread, 0), value + spread, op.draw)
end

local function failed(op, state)
  local before = state.interval
  if op.steady == 1 then state.successes = 0 end
  if before == 0 then
    state.interval = op.initial
    return
  end
  local value = op.up > 0 and max(thousandths(before, op.up), before + 1) or before + op.initial
  if op.steady == 0 then
    state.interval = min(max(jittered(op, value, math.huge), op.initial), op.longest)
    return
  end
  value = min(value, op.summit)
  if value > before then state.interval = min(jittered(op, value, value - before - 1), op.longest) end
end

local function succeeded(op, state)
  if state.interval == 0 then return end
  state.successes = state.successes + 1
  if state.successes < op.threshold then return end
  local value = op.up > 0 and min(thousandths(state.interval, op.down), state.interval - 1)
    or max(state.interval - op.initial, 0)
  local most = op.steady == 1 and state.interval - value - 1 or math.huge
  local lower = min(jittered(op, value, most), op.longest)
  state.successes = 0
  state.interval = lower < op.initial and 0 or lower
end

tell[PACE] = function(op, state)
  if op.verb ~= STEP and op.verb ~= DEBIT then return false end
  settle_pace(op, state)
  if op.verb == DEBIT then
    if op.cost > state.interval then state.interval = min(max(op.cost, op.initial), op.longest) end
  else
    local failing
    op.answer = facts[PACE](state)
    op.summit, op.up, op.down, op.randomization, op.max_randomization, op.threshold, op.steady, failing, op.draw =
      unpack('<ddddddddd', bytes, op.place + 24)
    if failing == 1 then
      failed(op, state)
    else
      succeeded(op, state)
    end
  end
  if state.interval == 0 then
    state.successes, state.told_at = 0, 0
  else
    state.told_at = max(state.told_at, now)
  end
  return true
end
