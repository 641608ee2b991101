-- What all that follows begins with. All numbers are doubles, which count exactly to 2^53; moments and spans are
-- microseconds below 2^52, and `NEVER` is the last of them.
local unpack, pack, call = struct.unpack, struct.pack, redis.call
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

-- All arguments in one; but the name of the channel for resets.
local bytes = ARGV[1]

-- `slack` is added, in milliseconds, to the time after which a key expires.
local now, slack, counted_at, other_parts, holder = unpack('<dddBc8', bytes)
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- What each kind of limit does. `load` reads a state, and `save` writes it back. `judge` says whether there is room, and
-- where there is none sets `op.free_at`; `covers` whether what is left is as much as a parole; `charge` counts the call.
-- `tell` does what other verbs ask, and says whether there is anything to save. `facts` are what the caller needs to
-- answer as the whole state would.
local load, evaluate, has_room_for_parole, charge, apply, save, encode_state = {}, {}, {}, {}, {}, {}, {}

-- Picks a quota's period; see `quota.lua`.
local select_period

-- Until when a state is to be kept that is idle from `idle_at` on: a quarter longer than it has to be, so that the next
-- writes needn't move it. Every value tells it. Nothing, if it is kept for long enough as it is, and not for much
-- longer: by a clock that was ahead, for a year.
local function extend_expiry(state, idle_at)
  if state.exists and state.kept >= idle_at and state.kept <= idle_at + (idle_at - now) then return nil end
  state.kept = idle_at + floor((idle_at - now) / 4)
  return ceil((state.kept - now) / 1000) + slack
end

-- Writes a whole state that is idle from `idle_at` on, or forgets it if it is now. `before` comes before the time for which
-- it is kept, if anything does.
local function write_or_delete(state, idle_at, value, before)
  if idle_at > now then
    local length = extend_expiry(state, min(idle_at, NEVER))
    value = (before or '') .. pack('<d', state.kept) .. value
    if length then
      call('SET', state.key, value, 'PX', length)
    else
      call('SET', state.key, value, 'KEEPTTL')
    end
    state.exists = true
  elseif state.exists then
    call('DEL', state.key)
    state.exists = nil
  end
end
