-- Takes under rates and windows, the ordinary way: nothing here defines a function, and whatever is out of the ordinary
-- leaves this block by `break`, before anything was written, for the general script. `$` is an operation's number. What
-- is known of penalties is only that there is no record; see the other files for what all of it means.
local now, slack = unpack('<dd', bytes)
if now < 0 then
  if not present then
    local time = call('TIME')
    present = time[1] * 1000000 + time[2]
  end
  now = present
end
local is_refused, were_changed = false, false
