-- One take under a rate without a penalty: what `decide.lua` and `rate.lua` would do, and nothing else.
local unpack, pack, call = struct.unpack, struct.pack, redis.call

local now, slack = unpack('<dd', ARGV[1])
local never, cost, step, step_rest, refill, refill_rest = unpack('<xxxxBxxxddddd', ARGV[2])
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local value = call('GET', KEYS[1])
local tat, rest = 0, 0
if value then
  tat, rest = unpack('<dd', value)
end
local answer = pack('<ddd', now, tat, rest)

local edge = now + refill
local is_mended = false
if tat > edge then
  local far, far_rest = edge + refill + OVERTAKEN, refill_rest + refill_rest
  if far_rest >= 1024 then
    far, far_rest = far + 1, far_rest - 1024
  end
  if tat > far or (tat == far and rest > far_rest) then
    tat, rest, is_mended = edge, refill_rest, true
  end
elseif tat < now then
  tat, rest = now, 0
end

local after, after_rest = tat + step, rest + step_rest
if after_rest >= 1024 then
  after, after_rest = after + 1, after_rest - 1024
end
if never == 0 and (after < edge or (after == edge and after_rest <= refill_rest) or cost == 0) then
  tat, rest = after, after_rest
  if tat > NEVER then
    tat, rest = NEVER, 1023
  end
elseif not is_mended then
  return answer
end

local left = tat - now
if rest > 0 then left = left + 1 end
if left > 0 then
  local kept = pack('<dd', tat, rest)
  if value and #value > 16 then kept = kept .. string.sub(value, 17) end
  call('SET', KEYS[1], kept, 'PX', math.ceil(left / 1000) + slack)
end
return answer
