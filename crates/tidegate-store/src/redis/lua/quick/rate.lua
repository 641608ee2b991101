
local value$, expires$, offset$ = call('GET', KEYS[behind + $])
local kept$, found$, found_rest$ = 0, 0, 0
if value$ then
  if #value$ > 24 then break end
  kept$, found$, found_rest$ = unpack('<ddd', value$)
end
do
  local tat, rest, edge = found$, found_rest$, now + refill$
  if tat > edge or edge > NEVER or cost$ == 0 then break end
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
  local idle_at = rest > 0 and tat + 1 or tat
  if kept$ < idle_at or kept$ > idle_at + idle_at - now then
    kept$ = idle_at + floor((idle_at - now) / 4)
    expires$ = ceil((kept$ - now) / 1000) + slack
  end
  value$ = pack('<ddd', kept$, tat, rest)
end
