
local never$, cost$ = unpack('<xxxxBxxxd', ARGV[$ + 1])
local step$, step_rest$, refill$, refill_rest$ = unpack('<dddd', ARGV[$ + 1], place$)
local value$, left$, answer$ = call('GET', KEYS[$])
do
  local tat, rest = 0, 0
  if value$ then
    if #value$ > 16 then return general() end
    tat, rest = unpack('<dd', value$)
  end
  local edge = now + refill$
  if tat >= edge or edge > NEVER or cost$ == 0 then return general() end
  answer$ = pack('<dd', tat, rest) .. record$
  if tat < now then
    tat, rest = now, 0
  end
  tat, rest = tat + step$, rest + step_rest$
  if rest >= 1024 then
    tat, rest = tat + 1, rest - 1024
  end
  if never$ == 1 or tat > edge or (tat == edge and rest > refill_rest$) then
    if is_penalised$ then return general() end
    is_refused = true
  end
  value$, left$ = pack('<dd', tat, rest), tat + (rest > 0 and 1 or 0) - now
end
