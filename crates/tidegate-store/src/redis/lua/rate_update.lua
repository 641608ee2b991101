-- core/caller_rate.rs, with nanoseconds beyond whole microseconds.
local function take_by_terms(op, state)
  local cost, cost_nanos, tolerance, tolerance_nanos, gives_back = unpack('<ddddd', bytes, op.position)
  op.response = encode_state[RATE](state)
  local tat, nanos = now, 0
  if state.tat >= now then tat, nanos = state.tat, floor(state.tat_rest * 1000 / 1024) end
  if gives_back == 1 then cost, cost_nanos = -cost, -cost_nanos end
  tat, nanos = tat + cost, nanos + cost_nanos
  if nanos >= 1000 then tat, nanos = tat + 1, nanos - 1000 end
  if nanos < 0 then tat, nanos = tat - 1, nanos + 1000 end
  if is_later(tat, nanos, now + tolerance, tolerance_nanos) then return false end
  if tat < now then tat, nanos = now, 0 end
  state.tat, state.tat_rest = tat, ceil(nanos * 1024 / 1000)
  return true
end

apply[RATE] = function(op, state)
  if op.verb == TAKE_BY_TERMS then return take_by_terms(op, state) end
  if op.verb ~= REFUND then return false end
  evaluate[RATE](op, state)
  local tat, tat_rest = current_tat(state)
  tat, tat_rest = tat - op.cost_time, tat_rest - op.cost_rest
  if tat_rest < 0 then
    tat, tat_rest = tat - 1, tat_rest + 1024
  end
  if tat < now then
    tat, tat_rest = now, 0
  end
  state.tat, state.tat_rest = tat, tat_rest
  return true
end
