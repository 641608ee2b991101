-- A state that is one value: the time until which it is kept, what `encode_state` returns, and its penalty's record
-- unless that is empty.

-- Reads a value of `size` bytes and the record behind it. A missing value is all zeros.
local function read_value(state, size)
  local value = call('GET', state.key)
  if not value then return string.rep('\0', size) end
  state.exists = true
  if #value > size then state.blocked_until, state.parole, state.strikes = unpack('<ddB', value, size + 1) end
  return value
end

-- Writes the value of a state whose usage is idle from `idle_at` on.
local function write_value(op, state, idle_at)
  local value = encode_state[op.kind](state)
  if state.strikes > 0 or state.parole > 0 then
    value = value .. pack('<ddB', state.blocked_until, state.parole, state.strikes)
  end
  write_or_delete(state, max(idle_at, record_retained_until(op, state)), value)
end
