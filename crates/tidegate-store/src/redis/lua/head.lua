-- The beginning of the general script. All numbers are doubles, which count exactly to 2^53. Times and durations are
-- microseconds below 2^52, and `NEVER` is the latest time.
local unpack, pack, call = struct.unpack, struct.pack, redis.call
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

-- The header, then the operations. Another argument is the channel on which resets are published.
local bytes = ARGV[1]

-- `expiry_margin` is added, in milliseconds, to the time after which a key expires.
local now, expiry_margin, counted_at, other_parts, holder = unpack('<dddBc8', bytes)
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- The functions of each kind of limit. `load` reads a state, and `save` writes it back. `evaluate` returns true if
-- there is room, and sets `op.free_at` if there is none. `has_room_for_parole` returns true if the room covers the
-- parole. `charge` counts the call. `apply` executes the verbs that update, and returns true if there is anything to save.
-- `encode_state` returns what the caller needs for the outcomes of the whole state. For kinds whose state is one value
-- (`value.lua`), that is also what is stored.
local load, evaluate, has_room_for_parole, charge, apply, save, encode_state = {}, {}, {}, {}, {}, {}, {}

-- Selects a quota's period; see `quota.lua`.
local select_period

-- The functions of limits with reservations; see `reservations.lua`. Their `has_penalty` is RESERVES, and their rules have this
-- many bytes.
local RESERVES, RESERVATION_RULE_BYTES = 2, 64
local load_queue, evaluate_reserved, charge_reserved, reserve, save_queue

-- Returns the milliseconds after which a state expires that is idle from `idle_at` on. It is kept for a quarter longer
-- than needed, so that the next writes needn't change the expiry, which each value holds. Returns nil if the present
-- expiry is late enough and not much too late, as by a clock that was a year ahead.
local function extend_expiry(state, idle_at)
  if state.exists and state.kept_until >= idle_at and state.kept_until <= idle_at + (idle_at - now) then return nil end
  state.kept_until = idle_at + floor((idle_at - now) / 4)
  return ceil((state.kept_until - now) / 1000) + expiry_margin
end

-- Writes a whole state that is idle from `idle_at` on, or deletes it if it is idle now. The value is `before`, if
-- given, the time until which it is kept, and `value`.
local function write_or_delete(state, idle_at, value, before)
  if idle_at > now then
    local expires = extend_expiry(state, min(idle_at, NEVER))
    value = (before or '') .. pack('<d', state.kept_until) .. value
    if expires then
      call('SET', state.key, value, 'PX', expires)
    else
      call('SET', state.key, value, 'KEEPTTL')
    end
    state.exists = true
  elseif state.exists then
    call('DEL', state.key)
    state.exists = nil
  end
end
