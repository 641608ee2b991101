local TWO_POW_16, TWO_POW_32 = 65536, 4294967296

-- Multiplies by thousandths and rounds to the nearest: whole thousands first, as the whole product may not be exact.
local function scale_per_mille(nanos, per_mille)
  local rest = math.fmod(nanos, 1000)
  return (nanos - rest) / 1000 * per_mille + floor((rest * per_mille + 500) / 1000)
end

-- The number from `low` to `high` for 32 random bits: width × draw ÷ 2^32, by 16 bits of the width at a time, so that no
-- product exceeds 2^53.
local function scale_to_range(low, high, draw)
  local width = high - low + 1
  local upper = floor(width / TWO_POW_32)
  local lower = width - upper * TWO_POW_32
  local middle = floor(lower / TWO_POW_16)
  lower = lower - middle * TWO_POW_16
  return low + draw * upper + floor((draw * middle + floor(draw * lower / TWO_POW_16)) / TWO_POW_16)
end

local function add_jitter(op, value, max_jitter)
  local jitter = min(scale_per_mille(value, op.randomization), op.max_randomization, max_jitter)
  if jitter == 0 then return value end
  return scale_to_range(max(value - jitter, 0), value + jitter, op.draw)
end

local function record_failure(op, state)
  local before = state.interval
  if op.is_steady == 1 then state.successes = 0 end
  if before == 0 then
    state.interval = op.initial
    return
  end
  local value = op.up > 0 and max(scale_per_mille(before, op.up), before + 1) or before + op.initial
  if op.is_steady == 0 then
    state.interval = min(max(add_jitter(op, value, math.huge), op.initial), op.longest)
    return
  end
  value = min(value, op.max_before_jitter)
  if value > before then state.interval = min(add_jitter(op, value, value - before - 1), op.longest) end
end

local function record_success(op, state)
  if state.interval == 0 then return end
  state.successes = state.successes + 1
  if state.successes < op.threshold then return end
  local value = op.up > 0 and min(scale_per_mille(state.interval, op.down), state.interval - 1)
    or max(state.interval - op.initial, 0)
  local max_jitter = op.is_steady == 1 and state.interval - value - 1 or math.huge
  local interval = min(add_jitter(op, value, max_jitter), op.longest)
  state.successes = 0
  state.interval = interval < op.initial and 0 or interval
end

apply[PACE] = function(op, state)
  if op.verb ~= PACE_STEP and op.verb ~= DEBIT then return false end
  refresh_pace(op, state)
  if op.verb == DEBIT then
    if op.cost > state.interval then state.interval = min(max(op.cost, op.initial), op.longest) end
  else
    local has_failed
    op.response = encode_state[PACE](state)
    op.max_before_jitter, op.up, op.down, op.randomization, op.max_randomization, op.threshold, op.is_steady,
      has_failed, op.draw =
      unpack('<ddddddddd', bytes, op.position + 24)
    if has_failed == 1 then
      record_failure(op, state)
    else
      record_success(op, state)
    end
  end
  if state.interval == 0 then
    state.successes, state.updated_at = 0, 0
  else
    state.updated_at = max(state.updated_at, now)
  end
  return true
end
