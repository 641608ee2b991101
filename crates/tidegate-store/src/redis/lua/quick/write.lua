  if offset$ then
    -- A number is printed for a call as if it had a fraction, which takes longer.
    call('SETRANGE', KEYS[$], string.format('%d', offset$), value$)
    if expires$ then call('PEXPIRE', KEYS[$], expires$) end
  elseif expires$ then
    call('SET', KEYS[$], value$, 'PX', expires$)
  else
    call('SET', KEYS[$], value$, 'KEEPTTL')
  end
