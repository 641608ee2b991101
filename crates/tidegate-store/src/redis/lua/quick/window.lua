
local never$, cost$ = unpack('<xxxxBxxxd', ARGV[$ + 1])
local limit$, length$, entries$, most$, cell$, lead$, ahead$ = unpack('<ddddddd', ARGV[$ + 1], place$)
local value$, left$, answer$ = call('GETRANGE', KEYS[$], 0, 2047)
do
  local total, newest, oldest, head, size, coarse, first = 0, 0, 0, 0, 0, 0, 1
  local is_changed = false
  if value$ ~= '' then
    local ends, parole, strikes
    total, newest, oldest, head, size, coarse, ends, parole, strikes = unpack('<dddddBddB', value$)
    first = 59 + head * 16
    if first + size * 16 > 2049 or strikes > 0 or parole > 0 or newest > now + lead$ then return general() end
    while size > 0 and now - oldest >= length$ do
      local _, count = unpack('<dd', value$, first)
      total, size, first, is_changed = total - count, size - 1, first + 16, true
      if size > 0 then oldest = (unpack('<d', value$, first)) end
    end
    if total <= entries$ then coarse = 0 end
    if size == 0 then newest = 0 end
  end
  if cost$ == 0 then return general() end
  local free_from, free_count = 0, 0
  if never$ == 1 or total + cost$ > limit$ then
    if is_penalised$ or is_changed then return general() end
    is_refused = true
    local missing = never$ == 1 and 0 or total + cost$ - limit$
    for place = first, first + size * 16 - 16, 16 do
      if free_count >= missing then break end
      local at, count = unpack('<dd', value$, place)
      free_from, free_count = at, free_count + count
    end
  end
  answer$ = pack('<dddd', total, newest, free_from, free_count) .. record$
  local at, count, last = now + ahead$, cost$, first + size * 16 - 16
  if at > NEVER then at = NEVER end
  if size > 0 then
    if newest > at then at = newest end
    if newest == at or (coarse == 1 and floor(newest / cell$) == floor(at / cell$)) then
      local _, before = unpack('<dd', value$, last)
      count, last, size = count + before, last - 16, size - 1
    elseif size >= most$ then
      return general()
    end
  end
  if size == 0 then oldest = at end
  total = total + cost$
  if total > COUNTED then return general() end
  value$ = pack('<dddddBddB', total, at, oldest, 0, size + 1, coarse, 0, 0, 0)
    .. string.sub(value$, first, last + 15)
    .. pack('<dd', at, count)
  left$ = at + length$
  if left$ > NEVER then left$ = NEVER end
  left$ = left$ - now
  if is_changed then were_changed = true end
end
