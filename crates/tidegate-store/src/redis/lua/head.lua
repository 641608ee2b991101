-- What all that follows begins with. All numbers are doubles, which count exactly to 2^53; moments and spans are
-- microseconds below 2^52, and `NEVER` is the last of them.
local unpack, pack, call = struct.unpack, struct.pack, redis.call
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

-- All arguments in one; but the name of the channel for resets.
local bytes = ARGV[1]

-- `slack` is added, in milliseconds, to the time after which a key expires.
local now, slack, counted_at, outside, holder = unpack('<dddBc8', bytes)
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- What each kind of limit does. `load` reads a state, and `save` writes it back. `judge` says whether there is room, and
-- where there is none sets `op.free_at`; `covers` whether what is left is as much as a parole; `charge` counts the call.
-- `tell` does what other verbs ask, and says whether there is anything to save. `facts` are what the caller needs to
-- answer as the whole state would.
local load, judge, covers, charge, tell, save, facts = {}, {}, {}, {}, {}, {}, {}

-- Picks a quota's period; see `quota.lua`.
local period

-- Writes a whole state that is idle from `idle_at` on, or forgets it if it is now.
local function keep(state, idle_at, value)
  if idle_at > now then
    call('SET', state.key, value, 'PX', ceil((min(idle_at, NEVER) - now) / 1000) + slack)
  elseif state.exists then
    call('DEL', state.key)
  end
end
