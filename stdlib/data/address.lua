-- data/address.lua: joins addresses of data with the hashes of their content.
--
-- A path of data may be an address: https://HOST/PATH, hf://datasets/OWNER/NAME@REVISION/PATH, s3://BUCKET/KEY. Its content is named by
-- a hash, in the option `hash` or at the end of the address: "https://HOST/PATH#sha256:…". The runtime resolves both.

local pl = require "perilune"
local check = require "perilune.check"

---@alias perilune.Hash string|table<string, string> "sha256:…" or "blake3:…"; a table has the hash of each address

---@param path any
---@return boolean
local function is_address(path)
  return type(path) == "string" and path:find "^%a[%w+.-]*://" ~= nil
end

---The name of a file: that of an address is without query and hash.
---@param path string
---@return string
local function name(path)
  return is_address(path) and path:match "^[^#?]*" --[[@as string]] or path
end

---Adds hashes to the addresses of a list of paths; other paths stay as they are.
---@param op string
---@param paths string[]
---@param hash perilune.Hash?
---@return string[]
local function with_hashes(op, paths, hash)
  if hash == nil then return paths end
  if type(hash) ~= "string" and type(hash) ~= "table" then
    pl.error(op, "option 'hash' is " .. check.show(hash), "give the hash, hash = \"sha256:…\", or a table from address to hash; `perilune fetch ADDRESS` prints it")
  end
  local found, used, addresses = {}, {}, 0
  for i, path in ipairs(paths) do
    found[i] = path
    if is_address(path) then
      addresses = addresses + 1
      local one = hash
      if type(hash) == "table" then one, used[path] = hash[path], true end
      if one ~= nil and type(one) ~= "string" then pl.error(op, "the hash of " .. path .. " is " .. check.show(one), "write \"sha256:…\"") end
      if one ~= nil then
        if path:find("#", 1, true) then pl.error(op, path .. " has a hash already, and option 'hash' another", "write one of them") end
        found[i] = path .. "#" .. one
      end
    end
  end
  if addresses == 0 then pl.error(op, "option 'hash' is given, and no path is an address", "leave it out: hashes name the content of https://, hf:// and s3:// addresses") end
  if type(hash) == "string" and addresses > 1 then
    pl.error(op, ("one hash is given for %d addresses"):format(addresses), "give a table from address to hash: hash = { [\"https://…\"] = \"sha256:…\" }")
  end
  if type(hash) == "table" then
    for address in pairs(hash) do
      if not used[address] then pl.error(op, "option 'hash' has " .. check.show(address) .. ", which is none of the addresses", "its keys are the addresses as they are in the list") end
    end
  end
  return found
end

---Adds a hash to one path.
---@param op string
---@param path string
---@param hash perilune.Hash?
---@return string
local function with_hash(op, path, hash)
  return with_hashes(op, { path }, hash)[1] --[[@as string]]
end

return { name = name, with_hash = with_hash, with_hashes = with_hashes }
