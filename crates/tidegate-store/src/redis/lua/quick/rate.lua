
local value$, left$ = call('GET', KEYS[$])
local found$, found_rest$ = 0, 0
if value$ then
  if #value$ > 16 then break end
  found$, found_rest$ = unpack('<dd', value$)
end
do
  local tat, rest, edge = found$, found_rest$, now + refill$
  if tat >= edge or edge > NEVER or cost$ == 0 then break end
  if tat < now then
    tat, rest = now, 0
  end
  tat, rest = tat + step$, rest + step_rest$
  if rest >= 1024 then
    tat, rest = tat + 1, rest - 1024
  end
  if never$ == 1 or tat > edge or (tat == edge and rest > refill_rest$) then
    if is_penalised$ then break end
    is_refused = true
  end
  value$, left$ = pack('<dd', tat, rest), tat + (rest > 0 and 1 or 0) - now
end
