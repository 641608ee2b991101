-- Takes under rates and windows, the ordinary way: nothing here defines a function, and whatever is out of the ordinary is
-- left to `general`, before anything was written. `$` is an operation's number. What is known of penalties is only that
-- there is no record; see the other files for what all of it means.
local unpack, pack, call = struct.unpack, struct.pack, redis.call
local floor, ceil = math.floor, math.ceil

local now, slack = unpack('<dd', ARGV[1])
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local is_refused, were_changed = false, false
