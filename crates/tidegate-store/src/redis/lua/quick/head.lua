-- Takes under rates and windows in the usual cases. No function is defined here. In an unusual case, this block ends by
-- `break` before anything is written, and the general script takes over. `$` is an operation's number. Operations with
-- a penalty are decided here only while there is no record. The other files explain the states.
local now, expiry_margin = unpack('<dd', bytes)
if now < 0 then
  if not server_time then
    local time = call('TIME')
    server_time = time[1] * 1000000 + time[2]
  end
  now = server_time
end
local is_refused, any_expired = false, false
