-- Keeps a node's announcement in the hash of all, and returns the time and all announcements. The arguments: the node,
-- the announcement without the time at its beginning, the milliseconds for which the hash is kept if they are more than
-- 0, and the time of a caller whose own clock counts.
local node, announcement, kept_for, time = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not time then
  local clock = redis.call('TIME')
  time = struct.pack('<I8', clock[1] * 1000000 + clock[2])
end
redis.call('HSET', KEYS[1], node, time .. announcement)
if kept_for ~= '0' then redis.call('PEXPIRE', KEYS[1], kept_for) end
return { time, redis.call('HVALS', KEYS[1]) }
