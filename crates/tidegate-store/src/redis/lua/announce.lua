-- Keeps a node's announcement in the hash of all, and returns the time and all announcements, each after its name. The
-- arguments: the node, the announcement without the time at its beginning, the milliseconds for which the hash is kept if
-- they are more than 0, and the time of a caller whose own clock counts. A hash that other programs have filled begins
-- anew: each node announces itself again. Values that are no announcements of a node are removed here if they are long,
-- and by the caller otherwise.
local node, announcement, kept_for, time = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not time then
  local clock = redis.call('TIME')
  time = struct.pack('<I8', clock[1] * 1000000 + clock[2])
end
if redis.call('HLEN', KEYS[1]) > MAX_READ then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], node, time .. announcement)
if kept_for ~= '0' then redis.call('PEXPIRE', KEYS[1], kept_for) end
local announcements = {}
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if #name == #node and redis.call('HSTRLEN', KEYS[1], name) <= MAX_BYTES then
    announcements[#announcements + 1] = { name, redis.call('HGET', KEYS[1], name) }
  else
    redis.call('HDEL', KEYS[1], name)
  end
end
return { time, announcements }
